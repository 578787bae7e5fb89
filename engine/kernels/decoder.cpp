// The forward of a decoder: one function that all threads run together, from the embeddings to the logits. Between two
// steps that need all of each other's results the threads wait at a barrier, and nothing else happens: no operator is
// called, and no memory is allocated.
#include "decoder.h"
#include "sampling.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

constexpr long FEW = 16;     // So few tokens are normalised by each thread for itself: that is faster than to wait.
constexpr long AT_ONCE = 256;  // The most tokens that go through the layers together.
constexpr long SMALL = 64 << 10;  // Numbers of all weights of so small a model are not shared out.

enum Activation { GELU, GELU_TANH, RELU, SILU };  // as in decoderLayers.py

// The activation of 32 numbers. One loop for each: the compiler vectorises no loop over several.
static inline void activate(float* x, long kind) {
    auto each = [&](auto f) { for (long j = 0; j < SIDE; j++) x[j] = f(x[j]); };
    auto logistic = [](float y) { return 1 / (1 + expf(-std::clamp(y, -80.f, 80.f))); };  // Beyond 80, exp is slow.
    switch (kind) {
        case GELU: return each(gelu_of);
        case GELU_TANH: return each([&](float y) { return y * logistic(1.5957691f * (y + 0.044715f * y * y * y)); });
        case RELU: return each([](float y) { return std::max(y, 0.f); });
        case SILU: return each([&](float y) { return y * logistic(y); });
    }
}

// y[size] = the normalised x[size]. W: of the norm's weights.
template <typename W, typename Y>
static void normalised_by(const Norm& norm, const float* x, Y* y, long size) {
    float sum = 0, squares = 0;
    for (long i = 0; i < size && !norm.rms; i++) sum += x[i];
    float mean = sum / size;
    for (long i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
    float factor = 1 / std::sqrt(squares / size + norm.eps);
    const W* weight = norm.weight.defined() ? data<W>(norm.weight) : nullptr;
    const W* bias = norm.bias.defined() ? data<W>(norm.bias) : nullptr;
    if (weight && !bias)
        for (long i = 0; i < size; i++) narrow((x[i] - mean) * factor * wide(weight[i]), y + i);
    else
        for (long i = 0; i < size; i++)
            narrow((x[i] - mean) * factor * (weight ? wide(weight[i]) : 1) + (bias ? wide(bias[i]) : 0), y + i);
}

// The same, of weights in T or float32. Where there is no norm, y is x.
template <typename T, typename Y>
static void normalised(const Norm& norm, const float* x, Y* y, long size) {
    if (norm.absent)
        for (long i = 0; i < size; i++) narrow(x[i], y + i);
    else if (norm.weight.defined() && norm.weight.scalar_type() == at::kFloat) normalised_by<float>(norm, x, y, size);
    else normalised_by<T>(norm, x, y, size);
}

// The slot after that of a node's parent; of the root, its own. The highest bit of `ancestors` is the node itself.
static int64_t after_parent(int64_t root, int64_t ancestors) {
    auto highest = [](uint64_t x) { return 63 - __builtin_clzll(x); };
    uint64_t above = ancestors ? ancestors & ((1ull << highest(ancestors)) - 1) : 0;
    return above ? root + highest(above) + 1 : root;
}

// Of the ancestors of a node, the last `count`: each of them has the position before the next one's.
static int64_t nearest(uint64_t ancestors, long count) {
    while (__builtin_popcountll(ancestors) > count) ancestors &= ancestors - 1;
    return ancestors;
}

static at::Tensor part_of(const Named& named, const std::string& name) {
    auto found = named.find(name);
    return found == named.end() ? at::Tensor() : found->value();
}

Decoder::Decoder(const c10::List<Named>& given, const Named& ends, const c10::Dict<std::string, int64_t>& sizes,
                 const c10::Dict<std::string, double>& numbers) {
    hidden = sizes.at("hidden"), heads = sizes.at("heads"), groups = sizes.at("groups"), width = sizes.at("width");
    rotary = sizes.at("rotary"), vocabulary = sizes.at("vocabulary"), offset = sizes.at("offset");
    activation = sizes.at("activation"), parallel = sizes.at("parallel"), gated = sizes.at("gated");
    window = sizes.at("window"), scores = {float(numbers.at("scale")), float(numbers.at("cap"))};
    embedding_scale = numbers.at("embedding_scale"), residual_scale = numbers.at("residual_scale");
    logit_scores = {float(numbers.at("logit_scale")), float(numbers.at("logit_cap"))};
    long inner = sizes.at("inner"), all = (heads + 2 * groups) * width;
    auto norm = [&](const Named& named, const std::string& name) {
        return Norm{part_of(named, name), part_of(named, name + ".bias"), bool(sizes.at("rms")), float(numbers.at("eps")),
                    !named.contains(name)};
    };
    auto linear = [&](const Named& named, const std::string& name, long in, long out) {
        return Linear{part_of(named, name), part_of(named, name + ".bias"), in, out};
    };
    // Its blocks are those of the gate and of what it opens in turns.
    auto up_of = [&](const Named& named) {
        return linear(named, "up", hidden, part_of(named, "up").size(0) * SIDE);
    };
    for (const Named& named : given) {
        const bool windowed = data<int64_t>(part_of(ends, "windowed"))[layers.size()];
        const long table = data<int64_t>(part_of(ends, "tables"))[layers.size()];
        layers.push_back({norm(named, "before_attention"), norm(named, "after_attention"), norm(named, "before_mlp"),
                          norm(named, "after_mlp"), norm(named, "query"), norm(named, "key"),
                          linear(named, "qkv", hidden, all), linear(named, "out", heads * width, hidden), up_of(named),
                          linear(named, "down", inner, hidden), windowed, table});
    }
    embedding = part_of(ends, "embedding"), places = part_of(ends, "positions"), kept = part_of(ends, "kept");
    last = norm(ends, "last"), head = linear(ends, "head", hidden, kept.defined() ? kept.numel() : vocabulary);
    if (!kept.defined()) head.out = std::min<long>(vocabulary, head.packed.size(0) * SIDE);
    taps = part_of(ends, "taps");
    if (taps.defined()) fuse = linear(ends, "fuse", taps.numel() * hidden, hidden);
    join = linear(ends, "join", 2 * hidden, hidden);
    token_norm = norm(ends, "token_norm"), feature_norm = norm(ends, "feature_norm");
}

void Decoder::bind(std::vector<at::Tensor> new_keys, std::vector<at::Tensor> new_values, at::Tensor new_cos,
                   at::Tensor new_sin, std::optional<at::Tensor> new_features) {
    features = new_features.value_or(at::Tensor());
    TORCH_CHECK(!features.defined() || (features.is_contiguous() && features.size(2) == hidden &&
                                        features.scalar_type() == at::kFloat), "features are of another shape");
    keys = std::move(new_keys), values = std::move(new_values), cos = std::move(new_cos), sin = std::move(new_sin);
}

// The inputs and the result of a forward.
struct Decoder::Block {
    // Of each token that is computed, those of a row side by side. rows: of the KV cache. roots, ancestors: of nodes.
    // before: where a head finds the feature before the token. from, near: the first slot and the ancestors in the window.
    std::vector<int64_t> tokens, positions, slots, rows, roots, ancestors, before, from, near;
    // A token whose logits are computed: which one, how many others are before it, and its place in the result. feature:
    // where its last hidden state is written, or null.
    struct Wanted {
        long token, before, place;
        float* feature;
    };
    std::vector<Wanted> wanted;  // in the order of tokens
    float* logits;               // [..., vocabulary]
};

// Memory that the threads share, from one forward to the next.
template <typename T>
struct Decoder::Room {
    std::vector<float> hidden, qkv, added;
    std::vector<T> normed, queries, attended, inner, ends, joined, tapped;
    std::vector<Span> spans;
    Packed<T> packed;

    void reserve(const Decoder& model, long tokens, long wanted) {
        auto grow = [](auto& numbers, size_t size) {
            if (numbers.size() < size) numbers.resize(size);
        };
        grow(hidden, tokens * model.hidden), grow(normed, tokens * model.hidden);
        grow(qkv, tokens * model.layers[0].qkv.out), grow(inner, tokens * model.layers[0].down.in);
        grow(queries, tokens * model.heads * model.width), grow(attended, tokens * model.heads * model.width);
        grow(ends, wanted * model.hidden);
        if (!model.layers[0].after_mlp.absent) grow(added, tokens * model.hidden);
        if (model.is_head() && tokens > FEW) grow(joined, tokens * 2 * model.hidden);
        if (model.is_tapped()) grow(tapped, tokens * model.fuse.in);
    }
};

// One thread's part of a forward. The methods are the steps; where a step needs what other threads computed, `layer`
// waits before it.
template <typename T>
struct Decoder::Pass {
    const Decoder& model;
    Block& block;
    Room<T>& room;
    const Member& member;
    // The chunk: its first token, its tokens, and its part of `wanted`.
    long start = 0, tokens = 0, first_wanted = 0, last_wanted = 0;
    const bool is_tapped = model.is_tapped();  // Then features of all tokens are written.
    Attention<T> attention = {room.spans};

    // Reads `count` tokens from the first one on into the KV cache.
    void chunk(long first, long count) {
        start = first, tokens = count, first_wanted = last_wanted;
        while (last_wanted < long(block.wanted.size()) && block.wanted[last_wanted].token < start + tokens) last_wanted++;
        long needed = last_wanted > first_wanted ? local(last_wanted - 1) + 1 : 0;  // Tokens that are wanted.
        auto from = [&](const std::vector<int64_t>& x) { return x.empty() ? nullptr : x.data() + start; };
        attention.heads = model.heads, attention.groups = model.groups, attention.D = model.width;
        attention.capacity = model.keys[0].size(2), attention.scores = model.scores;
        attention.queries = room.queries.data(), attention.out = room.attended.data();
        attention.at = from(block.slots), attention.roots = from(block.roots);
        if (member.number == 0) find_spans();
        embed();
        prefetch(member, model.layers[0].qkv);
        member.wait();
        for (size_t l = 0; l < model.layers.size(); l++) {
            attention.keys = (T*)model.keys[l].data_ptr(), attention.values = (T*)model.values[l].data_ptr();
            const bool windowed = model.layers[l].windowed, is_last = l + 1 == model.layers.size();
            attention.from = windowed ? from(block.from) : nullptr;
            attention.ancestors = from(windowed ? block.near : block.ancestors);
            tap(l);
            layer(model.layers[l], is_last && needed < count && !is_tapped);
            prefetch(member, is_last ? model.head : model.layers[l + 1].qkv);
            member.wait();
        }
        tap(model.layers.size());
        end();
        member.wait();
        if (is_tapped) write_features();
    }

    // One layer. If only_wanted, it goes on with the wanted tokens alone once keys and values are placed.
    void layer(const Layer& layer, bool only_wanted) {
        to_qkv(layer);
        if (model.parallel && !only_wanted) {
            if (tokens > FEW) member.wait();  // The normalised tokens are read until here.
            to_inner(layer);
        }
        member.wait();
        place(layer);
        member.wait();
        if (only_wanted) {
            drop_others();
            if (model.parallel) to_inner(layer);
        }
        attend(attention, room.packed, member);
        prefetch(member, layer.out);
        member.wait();
        add(layer.out, room.attended.data(), layer.after_attention);
        if (!model.parallel) {
            prefetch(member, layer.up, model.gated);
            member.wait();
            to_inner(layer);
            prefetch(member, layer.down);
            member.wait();
        }
        add(layer.down, room.inner.data(), layer.after_mlp);
    }

    // Where the token of wanted[k] is in the chunk once the others are dropped.
    long local(long k) const {
        return is_tapped ? block.wanted[k].token - start : block.wanted[k].before - block.wanted[first_wanted].before;
    }

    void find_spans() {
        const int64_t* from = block.from.empty() ? nullptr : block.from.data() + start;
        ::find_spans(block.rows.data() + start, block.slots.data() + start, from, tokens, room.spans);
        room.packed.reserve(room.spans, model.groups, model.width);
    }

    void embed() {
        if (model.is_head()) return join();
        auto [first, last] = member.part(tokens);
        for (long m = first; m < last; m++) {
            const T* row = data<T>(model.embedding) + block.tokens[start + m] * model.hidden;
            float* x = room.hidden.data() + m * model.hidden;
            for (long i = 0; i < model.hidden; i++) x[i] = wide(row[i]) * model.embedding_scale;
            if (!model.places.defined()) continue;
            const T* place = data<T>(model.places) + (block.positions[start + m] + model.offset) * model.hidden;
            for (long i = 0; i < model.hidden; i++) x[i] += wide(place[i]);
        }
    }

    // write(m, to) for all tokens m, which writes `size` numbers. Of few tokens, each thread has its own copy.
    template <typename F>
    const T* for_all(long size, std::vector<T>& shared, const F& write) {
        static thread_local std::vector<T> own;
        const bool few = tokens <= FEW;
        if (few) own.resize(std::max(own.size(), size_t(tokens * size)));
        T* to = few ? own.data() : shared.data();
        auto [first, last] = few ? Member::Part{0, tokens} : member.part(tokens);
        for (long m = first; m < last; m++) write(m, to + m * size);
        if (!few) member.wait();
        return to;
    }

    // All tokens, normalised.
    const T* normed(const Norm& norm) {
        return for_all(model.hidden, room.normed, [&](long m, T* to) {
            normalised<T>(norm, room.hidden.data() + m * model.hidden, to, model.hidden);
        });
    }

    // What a head's first layer reads: each token's embedding and the feature before it.
    void join() {
        static thread_local std::vector<float> embedded;
        const long size = model.hidden;
        embedded.resize(size);
        const T* x = for_all(2 * size, room.joined, [&](long m, T* to) {
            const T* row = data<T>(model.embedding) + block.tokens[start + m] * size;
            for (long i = 0; i < size; i++) embedded[i] = wide(row[i]) * model.embedding_scale;
            normalised<T>(model.token_norm, embedded.data(), to, size);
            normalised<T>(model.feature_norm, model.feature(block.rows[start + m], block.before[start + m]), to + size, size);
        });
        multiply(member, x, model.join, tokens, false, [&](long b, long m, Sums* sums, long) {
            std::memcpy(room.hidden.data() + m * size + b * SIDE, sums->of, std::min(SIDE, size - b * SIDE) * 4);
        });
    }

    // Keeps the hidden states after `layers` layers, if they are tapped.
    void tap(long layers) {
        if (!is_tapped) return;
        const long size = model.hidden;
        auto [first, last] = member.part(tokens);
        for (long k = 0; k < model.taps.numel(); k++) {
            if (data<int64_t>(model.taps)[k] != layers) continue;
            for (long m = first; m < last; m++) {
                const float* x = room.hidden.data() + m * size;
                T* to = room.tapped.data() + m * model.fuse.in + k * size;
                if (layers == long(model.layers.size())) normalised<T>(model.last, x, to, size);
                else for (long i = 0; i < size; i++) narrow(x[i], to + i);
            }
        }
    }

    void write_features() {
        multiply(member, room.tapped.data(), model.fuse, tokens, false, [&](long b, long m, Sums* sums, long) {
            float* to = model.feature(block.rows[start + m], block.slots[start + m] + 1);
            std::memcpy(to + b * SIDE, sums->of, std::min(SIDE, model.hidden - b * SIDE) * 4);
        });
    }

    void to_qkv(const Layer& layer) {
        multiply(member, normed(layer.before_attention), layer.qkv, tokens, false, [&](long b, long m, Sums* sums, long) {
            add_bias<T>(layer.qkv, b, *sums);
            long out = layer.qkv.out;
            std::memcpy(room.qkv.data() + m * out + b * SIDE, sums->of, std::min(SIDE, out - b * SIDE) * 4);
        });
    }

    void to_inner(const Layer& layer) {
        const long size = layer.down.in;
        auto sink = [&](long b, long m, Sums* sums, long apart) {
            float* y = sums->of;
            add_bias<T>(layer.up, b, *sums);
            activate(y, model.activation);
            if (model.gated) {
                add_bias<T>(layer.up, b + 1, sums[apart]);
                for (long j = 0; j < SIDE; j++) y[j] *= sums[apart].of[j];
            }
            long place = (model.gated ? b / 2 : b) * SIDE, count = std::min(SIDE, size - place);
            for (long j = 0; j < count; j++) narrow(y[j], room.inner.data() + m * size + place + j);
        };
        multiply(member, normed(layer.before_mlp), layer.up, tokens, model.gated, sink);
    }

    // Adds what a linear layer makes of x, normalised if there is a norm after it, to the hidden states.
    void add(const Linear& linear, const T* x, const Norm& after) {
        const long size = model.hidden;
        const bool normalises = !after.absent;
        multiply(member, x, linear, tokens, false, [&](long b, long m, Sums* sums, long) {
            add_bias<T>(linear, b, *sums);
            const long place = m * size + b * SIDE, count = std::min(SIDE, size - b * SIDE);
            float* y = room.hidden.data() + place;
            if (normalises) std::memcpy(room.added.data() + place, sums->of, count * 4);
            else
                for (long j = 0; j < count; j++) y[j] += sums->of[j] * model.residual_scale;
        });
        if (!normalises) return;
        member.wait();
        auto [first, last] = member.part(tokens);
        for (long m = first; m < last; m++) {
            float *x = room.added.data() + m * size, *y = room.hidden.data() + m * size;
            normalised<T>(after, x, x, size);
            for (long i = 0; i < size; i++) y[i] += x[i] * model.residual_scale;
        }
    }

    // Queries and keys are normalised and rotated; keys and values are written to their slots.
    void place(const Layer& layer) {
        const long heads = model.heads, groups = model.groups, width = model.width, all = heads + 2 * groups;
        const bool whole = layer.query.size() > width;  // one norm of all heads
        if (whole) {
            auto [first, last] = member.part(tokens);
            for (long m = first; m < last; m++) {
                float *queries = room.qkv.data() + m * all * width, *keys = queries + heads * width;
                normalised<T>(layer.query, queries, queries, heads * width);
                normalised<T>(layer.key, keys, keys, groups * width);
            }
            member.wait();
        }
        auto [first, last] = member.part(tokens * all);
        for (long task = first; task < last; task++) {
            long m = task / all, h = task % all;
            float* x = room.qkv.data() + task * width;
            const bool is_query = h < heads, is_value = h >= heads + groups;
            const Norm& norm = is_query ? layer.query : layer.key;
            if (!is_value && !norm.absent && !whole) normalised<T>(norm, x, x, width);
            if (!is_value && layer.table >= 0) rotate(x, layer.table * model.cos.size(1) + block.positions[start + m]);
            T* kept = (is_value ? attention.values : attention.keys);
            T* to = is_query ? room.queries.data() + attention.place(m, h)
                             : kept + attention.cell(block.rows[start + m], (h - heads) % groups) +
                                   block.slots[start + m] * width;
            for (long i = 0; i < width; i++) narrow(x[i], to + i);
        }
    }

    // row: of the tables
    void rotate(float* x, long row) const {
        const long half = model.rotary / 2;
        const float *c = data<float>(model.cos) + row * half, *s = data<float>(model.sin) + row * half;
        for (long i = 0; i < half; i++) {
            float one = x[i], other = x[i + half];
            x[i] = one * c[i] - other * s[i], x[i + half] = other * c[i] + one * s[i];
        }
    }

    // From here on the chunk has the wanted tokens alone: nobody reads more of the others than their keys and values.
    void drop_others() {
        const long of_queries = model.heads * model.width;
        auto move = [&](auto& numbers, long from, long to, long size) {
            std::copy_n(numbers.begin() + from * size, size, numbers.begin() + to * size);
        };
        tokens = last_wanted > first_wanted ? local(last_wanted - 1) + 1 : 0;
        if (member.number == 0) {
            for (long k = first_wanted; k < last_wanted; k++) {
                long from = block.wanted[k].token - start, to = local(k);
                if (from == to) continue;
                move(room.hidden, from, to, model.hidden), move(room.queries, from, to, of_queries);
                for (auto* numbers : {&block.slots, &block.rows, &block.roots, &block.ancestors, &block.from, &block.near})
                    if (!numbers->empty()) move(*numbers, start + from, start + to, 1);
            }
            find_spans();
        }
        member.wait();
    }

    // The last norm of the wanted tokens.
    void end() {
        for (long k = first_wanted + member.number; k < last_wanted; k += member.of) {
            T* to = room.ends.data() + k * model.hidden;
            normalised<T>(model.last, room.hidden.data() + local(k) * model.hidden, to, model.hidden);
            float* feature = block.wanted[k].feature;
            for (long i = 0; feature && i < model.hidden; i++) feature[i] = wide(to[i]);
        }
    }

    void logits() {
        const Linear& head = model.head;
        const Scores scores = model.logit_scores;
        multiply(member, room.ends.data(), head, block.wanted.size(), false, [&](long b, long k, Sums* sums, long) {
            add_bias<T>(head, b, *sums);
            long count = std::min(SIDE, head.out - b * SIDE);
            for (long j = 0; j < count; j++) sums->of[j] = scores(sums->of[j]);
            float* y = block.logits + block.wanted[k].place * model.vocabulary;
            if (!model.kept.defined()) std::memcpy(y + b * SIDE, sums->of, count * 4);
            else
                for (long j = 0; j < count; j++) y[data<int64_t>(model.kept)[b * SIDE + j]] = sums->of[j];
        });
    }
};

template <typename T>
void Decoder::run(Block& block) {
    static thread_local Room<T> of_caller;
    Room<T>& room = of_caller;  // The other threads use it too.
    const long tokens = block.tokens.size(), chunks = (tokens + AT_ONCE - 1) / AT_ONCE;
    room.reserve(*this, std::min(tokens, AT_ONCE), block.wanted.size());
    together(layers.size() * layers[0].up.in * layers[0].up.out > SMALL, [&](const Member& member) {
        Pass<T> pass{*this, block, room, member};
        for (long chunk = 0; chunk < chunks; chunk++) {
            long start = tokens * chunk / chunks;
            pass.chunk(start, tokens * (chunk + 1) / chunks - start);
        }
        pass.logits();
        multiply_in_use().done();
    });
}

at::Tensor Decoder::forward(const at::Tensor& tokens, const at::Tensor& positions, const std::optional<at::Tensor>& slots,
                            const std::optional<at::Tensor>& root, const std::optional<at::Tensor>& ancestors,
                            const std::optional<at::Tensor>& keep, const std::optional<at::Tensor>& counts,
                            int64_t first_row) {
    return read(tokens, positions, slots, root, ancestors, keep, counts, first_row, !keep);
}

// guesses: whether the last token of each row, or every node, has no feature yet.
at::Tensor Decoder::read(const at::Tensor& tokens, const at::Tensor& positions, const std::optional<at::Tensor>& slots,
                         const std::optional<at::Tensor>& root, const std::optional<at::Tensor>& ancestors,
                         const std::optional<at::Tensor>& keep, const std::optional<at::Tensor>& counts,
                         int64_t first_row, bool guesses) {
    at::get_num_threads();  // Makes torch's number of threads that of this thread, too.
    TORCH_CHECK(!keys.empty(), "there is no KV cache: call `reserve` first");
    auto contiguous = [](const std::optional<at::Tensor>& x) { return x ? x->contiguous() : at::Tensor(); };
    auto ids = tokens.contiguous(), at = positions.contiguous(), to = contiguous(slots), roots = contiguous(root);
    auto masks = contiguous(ancestors), some = contiguous(keep), computed = contiguous(counts);
    for (const at::Tensor* x : {&ids, &at, &to, &roots, &masks, &some, &computed})
        TORCH_CHECK(!x->defined() || x->scalar_type() == at::kLong, "tokens, positions, places and counts must be int64");
    auto numbers = [](const at::Tensor& x) { return x.defined() ? data<int64_t>(x) : nullptr; };
    const long rows = ids.size(0), n = ids.size(1), wanted = some.defined() ? some.size(-1) : n;
    auto size = [&](const at::Tensor& x) { return x.dim() == 2 && x.size(0) == rows && x.size(1) == n; };
    TORCH_CHECK(0 <= first_row && first_row + rows <= keys[0].size(0) && size(at) && (!to.defined() || size(to)),
                "the KV cache has ", keys[0].size(0), " rows; tokens, positions and slots must be [rows, n]");
    TORCH_CHECK(features.defined() ? first_row + rows <= features.size(0) : !is_head(),
                "there are no features of these rows: the target must read them first");
    TORCH_CHECK(!roots.defined() || (roots.numel() == rows && masks.numel() == n), "places are of another shape");
    TORCH_CHECK(!computed.defined() || computed.numel() == rows, "there must be a count for each row");
    TORCH_CHECK(!some.defined() || some.dim() == 1 || some.size(0) == rows, "there must be kept tokens for each row");
    const int64_t *slot = numbers(to.defined() ? to : at), *kept_tokens = numbers(some);
    Block block;
    std::vector<long> order(wanted);  // of a row's kept tokens
    std::vector<bool> has_logits(rows * wanted);
    for (long b = 0; b < rows; b++) {
        const long count = computed.defined() ? numbers(computed)[b] : n, before = block.tokens.size();
        TORCH_CHECK(0 <= count && count <= n, "the block has no ", count, " tokens");
        for (long i = 0, m = b * n; i < count; i++, m++) {
            int64_t token = numbers(ids)[m], position = numbers(at)[m];
            TORCH_CHECK_INDEX(0 <= token && token < embedding.size(0), "there is no token ", token);
            TORCH_CHECK(0 <= slot[m] && slot[m] < keys[0].size(2), "there is no slot ", slot[m]);
            TORCH_CHECK(0 <= position && (!rotary || position < cos.size(1)) &&
                            (!places.defined() || position + offset < places.size(0)), "there is no position ", position);
            block.tokens.push_back(token), block.positions.push_back(position), block.slots.push_back(slot[m]);
            TORCH_CHECK(!features.defined() || slot[m] + 1 < features.size(1), "there is no feature of slot ", slot[m]);
            block.rows.push_back(first_row + b);
            if (roots.defined()) block.roots.push_back(numbers(roots)[b]), block.ancestors.push_back(numbers(masks)[i]);
            if (window) block.from.push_back(std::max<int64_t>(position - window + 1, 0));
            if (window && roots.defined()) block.near.push_back(nearest(numbers(masks)[i], window));
            if (is_head()) block.before.push_back(roots.defined() ? after_parent(numbers(roots)[b], numbers(masks)[i])
                                                                  : slot[m]);
        }
        const int64_t* kept_here = some.defined() && some.dim() == 2 ? kept_tokens + b * wanted : kept_tokens;
        auto token = [&](long k) { return some.defined() ? kept_here[k] : k; };
        for (long k = 0; k < wanted; k++) {
            TORCH_CHECK_INDEX(0 <= token(k) && token(k) < n, "there is no token ", token(k), " in the block");
            order[k] = k;
        }
        std::sort(order.begin(), order.end(), [&](long k, long l) { return token(k) < token(l); });
        for (long k : order) {
            if (token(k) >= count) break;
            const auto* last = block.wanted.empty() ? nullptr : &block.wanted.back();
            long m = before + token(k);
            const bool writes = is_head() && guesses && (roots.defined() || token(k) == count - 1);
            block.wanted.push_back({m, last ? last->before + (m > last->token) : 0, b * wanted + k,
                                    writes ? feature(first_row + b, block.slots[m] + 1) : nullptr});
            has_logits[b * wanted + k] = true;
        }
    }
    const bool all = long(block.wanted.size()) == rows * wanted;
    auto logits = kept.defined() ? at::full({rows, wanted, vocabulary}, -INFINITY, at::kFloat)
                  : all          ? at::empty({rows, wanted, vocabulary}, at::kFloat)
                                 : untouched_zeros({rows, wanted, vocabulary});
    block.logits = (float*)logits.data_ptr();
    for (long m = 0; m < rows * wanted && kept.defined() && !all; m++)
        if (!has_logits[m]) std::fill_n(block.logits + m * vocabulary, vocabulary, 0.f);
    if (embedding.scalar_type() == at::kBFloat16) run<bf16>(block);
    else run<float>(block);
    return logits;
}

std::tuple<at::Tensor, at::Tensor> Decoder::draw(const at::Tensor& tokens, const at::Tensor& positions,
                                                 const at::Tensor& u, const at::Tensor& settings,
                                                 const std::optional<at::Tensor>& counts, int64_t first_row) {
    const long rows = tokens.size(0), width = tokens.size(1), n = u.size(0);
    TORCH_CHECK(u.size(1) == rows && (!counts || (counts->scalar_type() == at::kLong && counts->numel() == rows)),
                "u must be [n, rows], and there must be a count for each row");
    auto drawn = at::zeros({rows, n}, tokens.options());
    auto q = counts ? untouched_zeros({rows, n, vocabulary}) : at::empty({rows, n, vocabulary}, at::kFloat);
    auto each = counts ? counts->contiguous() : at::full({rows}, n, tokens.options());
    auto block = tokens, from = u.contiguous(), end = at::full({1}, width - 1, tokens.options());
    auto counts_read = at::empty({rows}, tokens.options());  // Tokens of each row that the next forward reads.
    for (long i = 0; i < n; i++) {
        std::vector<long> left;  // Rows that draw.
        for (long row = 0; row < rows; row++) {
            const bool draws = data<int64_t>(each)[row] > i;
            if (draws) left.push_back(row);
            ((int64_t*)counts_read.data_ptr())[row] = draws ? block.size(1) : 0;
        }
        if (left.empty()) continue;
        long first = i == 0 ? 0 : width + i - 1;
        auto logits = this->read(block, positions.slice(1, first, width + i), {}, {}, {}, end, counts_read, first_row, true);
        if (i == 0) block = at::zeros({rows, 1}, tokens.options()), end = at::zeros({1}, tokens.options());
        together(left.size() > 1, [&](const Member& member) {
            static thread_local std::vector<float> room;
            static thread_local std::vector<double> parts;
            auto [at, last] = member.part(left.size());
            for (; at < last; at++) {
                const long row = left[at];
                float* law = (float*)q.data_ptr() + (row * n + i) * vocabulary;
                filter(data<float>(logits) + row * vocabulary, vocabulary, settings, law, room);
                int64_t token = pick_one(law, vocabulary, data<float>(from)[i * rows + row], parts);
                ((int64_t*)drawn.data_ptr())[row * n + i] = token;
                // A distribution of nan gives no token, V, which cannot be read.
                ((int64_t*)block.data_ptr())[row] = std::min<int64_t>(token, vocabulary - 1);
            }
        });
    }
    return {drawn, q};
}

// The operator `pack`: a weight [out, in] in blocks, as linear.h reads it. The last block is filled with zeros.
void pack(const at::Tensor& weight, const at::Tensor& packed) {
    long out = weight.size(0), words = weight.size(1) * weight.element_size() / 4;
    together(true, [&](const Member& member) {
        auto [first, last] = member.part(packed.size(0));
        for (long row = first * SIDE; row < last * SIDE; row += 16)
            pack_slots((const char*)weight.const_data_ptr() + row * words * 4, out - row, words,
                       (char*)packed.data_ptr() + (row / SIDE * words * SIDE + row % SIDE) * 4);
    });
}
