// The forward of a decoder: one function that all threads run together, from the embeddings to the logits. Between two
// steps that need all of each other's results the threads wait at a barrier, and nothing else happens: no operator is
// called, and no memory is allocated.
#include "decoder.h"
#include "sampling.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

constexpr long FEW = 16;     // So few tokens are normalised by each thread for itself: that is faster than to wait.
constexpr long AT_ONCE = 256;  // Tokens of a prompt that go through the layers together, of all rows.
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

// y[size] = the normalised x[size]. T: of the weights.
template <typename T, typename Y>
static void normalised(const Norm& norm, const float* x, Y* y, long size) {
    float sum = 0, squares = 0;
    for (long i = 0; i < size && !norm.rms; i++) sum += x[i];
    float mean = sum / size;
    for (long i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
    float factor = 1 / std::sqrt(squares / size + norm.eps);
    const T* weight = norm.weight.defined() ? data<T>(norm.weight) : nullptr;
    const T* bias = norm.bias.defined() ? data<T>(norm.bias) : nullptr;
    if (weight && !bias)
        for (long i = 0; i < size; i++) narrow((x[i] - mean) * factor * wide(weight[i]), y + i);
    else
        for (long i = 0; i < size; i++)
            narrow((x[i] - mean) * factor * (weight ? wide(weight[i]) : 1) + (bias ? wide(bias[i]) : 0), y + i);
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
    scale = numbers.at("scale");
    long inner = sizes.at("inner"), all = (heads + 2 * groups) * width;
    auto norm = [&](const Named& named, const std::string& name) {
        return Norm{part_of(named, name), part_of(named, name + ".bias"), bool(sizes.at("rms")), float(numbers.at("eps"))};
    };
    auto linear = [&](const Named& named, const std::string& name, long in, long out) {
        return Linear{part_of(named, name), part_of(named, name + ".bias"), in, out};
    };
    // Its blocks are those of the gate and of what it opens in turns.
    auto up_of = [&](const Named& named) {
        return linear(named, "up", hidden, part_of(named, "up").size(0) * SIDE);
    };
    for (const Named& named : given)
        layers.push_back({norm(named, "before_attention"), norm(named, "before_mlp"), norm(named, "query"),
                          norm(named, "key"), linear(named, "qkv", hidden, all),
                          linear(named, "out", heads * width, hidden), up_of(named),
                          linear(named, "down", inner, hidden)});
    embedding = part_of(ends, "embedding"), places = part_of(ends, "positions"), kept = part_of(ends, "kept");
    last = norm(ends, "last"), head = linear(ends, "head", hidden, kept.defined() ? kept.numel() : vocabulary);
    if (!kept.defined()) head.out = std::min<long>(vocabulary, head.packed.size(0) * SIDE);
}

void Decoder::bind(std::vector<at::Tensor> new_keys, std::vector<at::Tensor> new_values, at::Tensor new_cos,
                   at::Tensor new_sin) {
    keys = std::move(new_keys), values = std::move(new_values), cos = std::move(new_cos), sin = std::move(new_sin);
}

// The inputs and the result of a forward.
struct Decoder::Block {
    long rows, n, wanted;  // wanted: tokens of a row whose logits are computed
    const int64_t *tokens, *positions, *slots, *root, *ancestors, *keep;
    float* logits;  // [rows, wanted, vocabulary]
};

// Memory that the threads share, from one forward to the next.
template <typename T>
struct Decoder::Room {
    std::vector<float> hidden, qkv;
    std::vector<T> normed, queries, attended, inner, ends;
    std::vector<int64_t> slots;
    Packed<T> packed;

    // Of each row's n tokens, keeps those at `places`, ascending: what is read of them after their keys and values.
    void only(long rows, long n, const std::vector<std::pair<long, long>>& places, long width, long of_queries) {
        long to = 0;
        auto move = [&](auto& numbers, long m, long size) {
            std::copy_n(numbers.begin() + m * size, size, numbers.begin() + to * size);
        };
        for (long b = 0; b < rows; b++)
            for (auto [place, _] : places) {
                move(hidden, b * n + place, width), move(queries, b * n + place, of_queries), move(slots, b * n + place, 1);
                to++;
            }
    }
};

template <typename T>
void Decoder::run(const Block& block) {
    static thread_local Room<T> rooms;
    Room<T>& room = rooms;  // of the calling thread
    const long inner = layers[0].down.in, all = (heads + 2 * groups) * width;
    const long step = std::min(block.n, std::max(AT_ONCE / block.rows, 32l)), most = block.rows * step;
    auto grow = [](auto& numbers, size_t size) { if (numbers.size() < size) numbers.resize(size); };
    grow(room.hidden, most * hidden), grow(room.qkv, most * all), grow(room.normed, most * hidden);
    grow(room.queries, most * heads * width), grow(room.attended, most * heads * width);
    grow(room.inner, most * inner), grow(room.ends, block.rows * block.wanted * hidden), grow(room.slots, most);
    const bool shared = layers.size() * layers[0].up.in * layers[0].up.out > SMALL;

    together(shared, [&](const Member& member) {
        static thread_local std::vector<T> own;
        for (long start = 0; start < block.n; start += step) {
            long n = std::min(step, block.n - start), tokens = block.rows * n;
            auto at = [&](long m) { return m / n * block.n + start + m % n; };  // Where token m is in the block.
            float* x = room.hidden.data();
            const Layer* layer;
            std::vector<std::pair<long, long>> kept_here;  // (place in the chunk, place in the result), ascending
            for (long k = 0; block.keep && k < block.wanted; k++)
                if (start <= block.keep[k] && block.keep[k] < start + n) kept_here.push_back({block.keep[k] - start, k});
            std::sort(kept_here.begin(), kept_here.end());
            Attention<T> attention{block.rows, n, heads, groups, width, keys[0].size(2), scale, room.queries.data(),
                                   nullptr, nullptr, room.attended.data(), room.slots.data(), block.root,
                                   block.ancestors ? block.ancestors + start : nullptr};

            // The normalised tokens: all of them, for every thread.
            auto normed = [&](const Norm& norm) -> const T* {
                if (tokens <= FEW) {
                    if (long(own.size()) < tokens * hidden) own.resize(tokens * hidden);
                    for (long m = 0; m < tokens; m++) normalised<T>(norm, x + m * hidden, own.data() + m * hidden, hidden);
                    return own.data();
                }
                auto [first, last] = member.part(tokens);
                for (long m = first; m < last; m++)
                    normalised<T>(norm, x + m * hidden, room.normed.data() + m * hidden, hidden);
                member.wait();
                return room.normed.data();
            };
            auto to_qkv = [&](long b, long m, Sums* sums, long) {
                add_bias<T>(layer->qkv, b, *sums);
                std::memcpy(room.qkv.data() + m * all + b * SIDE, sums->of, std::min(SIDE, all - b * SIDE) * 4);
            };
            auto to_inner = [&](long b, long m, Sums* sums, long apart) {
                add_bias<T>(layer->up, b, *sums);
                float* y = sums->of;
                long place = (gated ? b / 2 : b) * SIDE, count = std::min(SIDE, inner - place);
                activate(y, activation);
                if (gated) {
                    add_bias<T>(layer->up, b + 1, sums[apart]);
                    for (long j = 0; j < SIDE; j++) y[j] *= sums[apart].of[j];
                }
                for (long j = 0; j < count; j++) narrow(y[j], room.inner.data() + m * inner + place + j);
            };
            auto add_to_hidden = [&](const Linear& linear) {
                return [&](long b, long m, Sums* sums, long) {
                    add_bias<T>(linear, b, *sums);
                    float* y = x + m * hidden + b * SIDE;
                    for (long j = 0; j < std::min(SIDE, hidden - b * SIDE); j++) y[j] += sums->of[j];
                };
            };
            // Queries and keys are normalised and rotated, keys and values written to their slots.
            auto place_qkv = [&](T* kept_keys, T* kept_values) {
                auto [first, last] = member.part(tokens * (heads + 2 * groups));
                for (long task = first; task < last; task++) {
                    long m = task / (heads + 2 * groups), h = task % (heads + 2 * groups), b = m / n;
                    float* y = room.qkv.data() + m * all + h * width;
                    bool is_query = h < heads, is_key = !is_query && h < heads + groups;
                    const Norm& norm = is_query ? layer->query : layer->key;
                    if ((is_query || is_key) && norm.weight.defined()) normalised<T>(norm, y, y, width);
                    if (is_query || is_key) {
                        const float* c = data<float>(cos) + block.positions[at(m)] * (rotary / 2);
                        const float* s = data<float>(sin) + block.positions[at(m)] * (rotary / 2);
                        for (long i = 0; i < rotary / 2; i++) {
                            float one = y[i], other = y[i + rotary / 2];
                            y[i] = one * c[i] - other * s[i], y[i + rotary / 2] = other * c[i] + one * s[i];
                        }
                    }
                    long group = (h - heads) % groups;
                    T* to = is_query ? room.queries.data() + (m * heads + h) * width
                                     : (is_key ? kept_keys : kept_values) + attention.cell(b, group) + room.slots[m] * width;
                    for (long i = 0; i < width; i++) narrow(y[i], to + i);
                }
            };

            auto [first, end] = member.part(tokens);
            for (long m = first; m < end; m++) {
                const T* row = data<T>(embedding) + block.tokens[at(m)] * hidden;
                const T* place = places.defined() ? data<T>(places) + (block.positions[at(m)] + offset) * hidden : nullptr;
                for (long i = 0; i < hidden; i++) x[m * hidden + i] = wide(row[i]) + (place ? wide(place[i]) : 0);
                room.slots[m] = block.slots[at(m)];
            }
            prefetch<T>(member, layers[0].qkv);
            member.wait();
            if (n >= CHUNK && member.number == 0) room.packed.reserve(attention);  // Barriers follow before it is used.
            for (size_t l = 0; l < layers.size(); l++) {
                layer = &layers[l];
                attention.keys = (T*)keys[l].data_ptr(), attention.values = (T*)values[l].data_ptr();
                multiply(member, normed(layer->before_attention), layer->qkv, tokens, false, to_qkv);
                const bool last_of_some = block.keep && l + 1 == layers.size();
                if (parallel && !last_of_some) {
                    if (tokens > FEW) member.wait();  // The normalised tokens are read until here.
                    multiply(member, normed(layer->before_mlp), layer->up, tokens, gated, to_inner);
                }
                member.wait();
                place_qkv(attention.keys, attention.values);
                member.wait();
                if (last_of_some) {  // Nobody reads the others any more, but for their keys and values.
                    if (member.number == 0) room.only(block.rows, n, kept_here, hidden, heads * width);
                    n = attention.n = kept_here.size(), tokens = block.rows * n;
                    member.wait();
                    if (n == 0) break;
                    if (parallel) multiply(member, normed(layer->before_mlp), layer->up, tokens, gated, to_inner);
                }
                attend(attention, room.packed, member);
                prefetch<T>(member, layer->out);
                member.wait();
                multiply(member, room.attended.data(), layer->out, tokens, false, add_to_hidden(layer->out));
                if (!parallel) {
                    prefetch<T>(member, layer->up, gated);
                    member.wait();
                    multiply(member, normed(layer->before_mlp), layer->up, tokens, gated, to_inner);
                    prefetch<T>(member, layer->down);
                    member.wait();
                }
                multiply(member, room.inner.data(), layer->down, tokens, false, add_to_hidden(layer->down));
                prefetch<T>(member, l + 1 < layers.size() ? layers[l + 1].qkv : head);
                member.wait();
            }
            for (long m = member.number; m < tokens; m += member.of) {
                long end = m / n * block.wanted + (block.keep ? kept_here[m % n].second : start + m % n);
                normalised<T>(last, x + m * hidden, room.ends.data() + end * hidden, hidden);
            }
            member.wait();
        }
        multiply(member, room.ends.data(), head, block.rows * block.wanted, false, [&](long b, long m, Sums* sums, long) {
            add_bias<T>(head, b, *sums);
            long count = std::min(SIDE, head.out - b * SIDE);
            float* y = block.logits + m * vocabulary;
            if (!kept.defined()) std::memcpy(y + b * SIDE, sums->of, count * 4);
            else
                for (long j = 0; j < count; j++) y[data<int64_t>(kept)[b * SIDE + j]] = sums->of[j];
        });
        multiply_in_use().done();
    });
}

at::Tensor Decoder::forward(const at::Tensor& tokens, const at::Tensor& positions, const std::optional<at::Tensor>& slots,
                            const std::optional<at::Tensor>& root, const std::optional<at::Tensor>& ancestors,
                            const std::optional<at::Tensor>& keep) {
    TORCH_CHECK(!keys.empty(), "there is no KV cache: call `reserve` first");
    auto contiguous = [](const std::optional<at::Tensor>& x) { return x ? x->contiguous() : at::Tensor(); };
    auto ids = tokens.contiguous(), at = positions.contiguous(), to = contiguous(slots), first = contiguous(root);
    auto masks = contiguous(ancestors), some = contiguous(keep);
    auto numbers = [](const at::Tensor& x) { return x.defined() ? data<int64_t>(x) : nullptr; };
    long rows = ids.size(0), n = ids.size(1), wanted = some.defined() ? some.numel() : n;
    auto size = [&](const at::Tensor& x) { return x.size(0) == rows && x.size(1) == n; };
    TORCH_CHECK(rows == keys[0].size(0) && size(at) && (!to.defined() || size(to)), "the KV cache has ", keys[0].size(0),
                " rows; tokens, positions and slots must be [rows, n]");
    for (const at::Tensor* x : {&ids, &at, &to, &first, &masks, &some})
        TORCH_CHECK(!x->defined() || x->scalar_type() == at::kLong, "tokens, positions and places must be int64");
    TORCH_CHECK(!first.defined() || (first.numel() == rows && masks.numel() == n), "places are of another shape");
    for (long k = 0; some.defined() && k < wanted; k++)
        TORCH_CHECK_INDEX(0 <= numbers(some)[k] && numbers(some)[k] < n, "there is no token ", numbers(some)[k],
                          " in the block");
    if (some.defined()) {  // `run` keeps tokens of a chunk in place: each of them once, and no nodes of trees.
        std::vector<int64_t> once(numbers(some), numbers(some) + wanted);
        std::sort(once.begin(), once.end());
        if (masks.defined() || std::adjacent_find(once.begin(), once.end()) != once.end())
            return forward(tokens, positions, slots, root, ancestors, {}).index_select(1, some);
    }
    const int64_t* slot = numbers(to.defined() ? to : at);
    for (long m = 0; m < rows * n; m++) {
        int64_t token = numbers(ids)[m], position = numbers(at)[m];
        TORCH_CHECK_INDEX(0 <= token && token < embedding.size(0), "there is no token ", token);
        TORCH_CHECK(0 <= slot[m] && slot[m] < keys[0].size(2), "there is no slot ", slot[m]);
        TORCH_CHECK(0 <= position && (!rotary || position < cos.size(0)) &&
                        (!places.defined() || position + offset < places.size(0)), "there is no position ", position);
    }
    auto logits = kept.defined() ? at::full({rows, wanted, vocabulary}, -INFINITY, at::kFloat)
                                 : at::empty({rows, wanted, vocabulary}, at::kFloat);
    Block block{rows, n, wanted, numbers(ids), numbers(at), slot, numbers(first), numbers(masks), numbers(some),
                (float*)logits.data_ptr()};
    if (embedding.scalar_type() == at::kBFloat16) run<bf16>(block);
    else run<float>(block);
    return logits;
}

std::tuple<at::Tensor, at::Tensor> Decoder::draw(const at::Tensor& tokens, const at::Tensor& positions,
                                                 const at::Tensor& u, const at::Tensor& settings) {
    long rows = tokens.size(0), width = tokens.size(1), n = u.size(0);
    auto drawn = at::empty({rows, n}, tokens.options()), q = at::empty({rows, n, vocabulary}, at::kFloat);
    auto block = tokens, from = u.contiguous(), end = at::full({1}, width - 1, tokens.options());
    for (long i = 0; i < n; i++) {
        long first = i == 0 ? 0 : width + i - 1;
        auto logits = forward(block, positions.slice(1, first, width + i), {}, {}, {}, end);
        if (i == 0) block = at::empty({rows, 1}, tokens.options()), end = at::zeros({1}, tokens.options());
        together(rows > 1, [&](const Member& member) {
            static thread_local std::vector<float> room;
            static thread_local std::vector<double> parts;
            auto [row, last] = member.part(rows);
            for (; row < last; row++) {
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

// The operator `linear`: x [..., in] times a packed weight -> float32 [..., out].
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t out) {
    auto rows = x.contiguous();
    auto shape = x.sizes().vec();
    long in = shape.back(), tokens = x.numel() / in;
    shape.back() = out;
    auto y = at::empty(shape, at::kFloat);
    Linear layer{packed, at::Tensor(), in, out};
    auto run = [&]<typename T>(T) {
        together(true, [&](const Member& member) {
            multiply(member, data<T>(rows), layer, tokens, false, [&](long b, long m, Sums* sums, long) {
                std::memcpy((float*)y.data_ptr() + m * out + b * SIDE, sums->of, std::min(SIDE, out - b * SIDE) * 4);
            });
            multiply_in_use().done();
        });
    };
    if (x.scalar_type() == at::kBFloat16) run(bf16());
    else run(float());
    return y;
}

// The operator `attend`: queries [B, n, H, D] attend to the slots up to their own, at [B, n], of keys and values
// [B, G, capacity, D] -> [B, n, H, D]. root [B] and ancestors [n]: of the nodes of a tree.
at::Tensor attend_slots(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& at, const std::optional<at::Tensor>& root,
                        const std::optional<at::Tensor>& ancestors, double scale) {
    auto out = at::empty(queries.sizes(), queries.options());
    auto run = [&]<typename T>(T) {
        Attention<T> attention{queries.size(0), queries.size(1), queries.size(2), keys.size(1), queries.size(3),
                               keys.size(2), float(scale), data<T>(queries), (T*)keys.data_ptr(), (T*)values.data_ptr(),
                               (T*)out.data_ptr(), data<int64_t>(at), root ? data<int64_t>(*root) : nullptr,
                               ancestors ? data<int64_t>(*ancestors) : nullptr};
        Packed<T> packed;
        packed.reserve(attention);
        together(true, [&](const Member& member) {
            attend(attention, packed, member);
            multiply_in_use().done();
        });
    };
    if (keys.scalar_type() == at::kBFloat16) run(bf16());
    else run(float());
    return out;
}
