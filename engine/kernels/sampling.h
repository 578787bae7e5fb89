// Filters, draws and verification rules. utils.py, decoding/verification.py and decoding/treeRules.py define what
// these compute.
#pragma once
#include "numbers.h"

static float total(const float* x, long n) {
    float sum = 0;
    for (long i = 0; i < n; i++) sum += x[i];
    return sum;
}

// Copies the numbers of p[n] that are at least `bound` to `room`, and returns how many they are.
static long at_least(float bound, const float* p, long n, std::vector<float>& room) {
    if (long(room.size()) < n + 16) room.resize(n + 16);
    float* to = room.data();
    long i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) {
        auto x = _mm512_loadu_ps(p + i);
        auto kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_GE_OQ);
        if (!kept) continue;
        // Not the instruction that compresses into memory: on Zen 4 it takes a hundred cycles.
        _mm512_storeu_ps(to, _mm512_maskz_compress_ps(kept, x));
        to += __builtin_popcount(kept);
    }
#endif
    for (; i < n; i++)
        if (p[i] >= bound) *to++ = p[i];
    return to - room.data();
}

// The k-th largest of x[n]: the least logit that top-k keeps. The row is split into parts. If the k-th largest of the
// parts' maxima is b, then at least k numbers are >= b, so smaller numbers can be skipped.
static float kth_largest(const float* x, long n, long k, std::vector<float>& room) {
    constexpr long PART = 64;
    float bound = -INFINITY;
    if (k <= n / PART) {
        room.clear();
        for (long i = 0; i + PART <= n; i += PART) {
            float top = x[i];
            for (long j = i; j < i + PART; j++) top = x[j] > top ? x[j] : top;
            room.push_back(top);
        }
        std::nth_element(room.begin(), room.begin() + (k - 1), room.end(), std::greater<float>());
        bound = room[k - 1];
    }
    long count = at_least(bound, x, n, room);
    std::nth_element(room.begin(), room.begin() + (k - 1), room.begin() + count, std::greater<float>());
    return room[k - 1];
}

// The least weight that top-p keeps: summed from the largest down, the weights up to this one reach top_p of the total.
// p[n]: weights of at most 1. sum: their total. Weights below (1 - top_p) / n of the total make up less than 1 - top_p
// of it, so the result is none of them. The others are summed in buckets by their leading bits, which is a coarse sort.
// Only the bucket in which top_p is reached is sorted.
static float least_kept(const float* p, long n, float sum, double top_p, std::vector<float>& room) {
    constexpr int DROPPED = 20, BUCKETS = (0x3f800000 >> DROPPED) + 1;
    double sums[BUCKETS] = {}, above = 0;
    auto bucket = [](float x) { return bits_of(x) >> DROPPED; };
    long count = at_least(float((1 - top_p) / n * sum * 0.99), p, n, room);  // 0.99 allows for rounding.
    top_p *= sum;
    for (long i = 0; i < count; i++) sums[bucket(room[i])] += room[i];
    int last = BUCKETS - 1;
    while (last > 0 && above + sums[last] < top_p) above += sums[last--];
    auto end = std::partition(room.begin(), room.begin() + count, [&](float x) { return bucket(x) == last; });
    if (end == room.begin()) return 0;  // Because of rounding, the sum of all does not reach top_p.
    std::sort(room.begin(), end, std::greater<float>());
    for (auto x = room.begin(); x < end; x++)
        if ((above += *x) >= top_p) return *x;
    return end[-1];
}

// p[n] = e^(heat (x - top)) where x is at least `floor`, else 0. Returns the sum. Equal logits get equal results.
static float exponentials(const float* x, long n, float top, float heat, float floor, float* p) {
#ifdef __AVX512F__
    auto sum = _mm512_setzero_ps();
    for (long i = 0; i < n; i += 16) {
        auto y = _mm512_maskz_loadu_ps(first(n - i), x + i);
        auto kept = _mm512_mask_cmp_ps_mask(first(n - i), y, _mm512_set1_ps(floor), _CMP_GE_OQ);
        auto heated = _mm512_mul_ps(_mm512_sub_ps(y, _mm512_set1_ps(top)), _mm512_set1_ps(heat));
        auto e = _mm512_maskz_mov_ps(kept, exponential(heated));
        _mm512_mask_storeu_ps(p + i, first(n - i), e);
        sum = _mm512_add_ps(sum, e);
    }
    return _mm512_reduce_add_ps(sum);
#else
    // In whole vectors: another exp would compute the remainder, and equal logits would get unequal results.
    std::vector<float> e((n + 15) / 16 * 16);
    for (long i = 0; i < n; i++) e[i] = std::max((x[i] - top) * heat, -87.f);  // Below -87 exp is slow, and p is 0.
    for (size_t i = 0; i < e.size(); i++) e[i] = expf(e[i]);
    for (long i = 0; i < n; i++) p[i] = x[i] < floor || (x[i] - top) * heat < -87.f ? 0 : e[i];
    return total(p, n);
#endif
}

// p[n] = the probabilities of the logits x[n] after temperature, top_k (0: all) and top_p (1: all), which `settings` holds,
// float64 [3]. A row with +inf or nan, or of -inf alone, gives nan.
static void filter(const float* x, long n, const at::Tensor& settings, float* p, std::vector<float>& room) {
    double temperature = data<double>(settings)[0], top_p = data<double>(settings)[2];
    long top_k = long(std::min(data<double>(settings)[1], 1e15));
    int wrong = 0;  // Whether there is +inf or nan. Tests the bits, as is_nan does.
    for (long i = 0; i < n; i++)
        wrong |= int(bits_of(x[i]) == 0x7f800000) | int((bits_of(x[i]) & 0x7fffffff) > 0x7f800000);
    float top = x[0];
    for (long i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    if (wrong || uint32_t(bits_of(top)) == 0xff800000) {
        for (long i = 0; i < n; i++) set_nan(p + i);
        return;
    }
    if (temperature == 0) {
        std::fill(p, p + n, 0.f);
        p[std::find(x, x + n, top) - x] = 1;
        return;
    }
    float heat = float(1 / temperature);
    float floor = 0 < top_k && top_k < n ? kth_largest(x, n, top_k, room) : -INFINITY;
    float sum = exponentials(x, n, top, heat, floor, p);
    if (top_p < 1) {
        float least = least_kept(p, n, sum, top_p, room);
        sum = 0;
        for (long i = 0; i < n; i++) sum += p[i] = p[i] < least ? 0 : p[i];
    }
    for (long i = 0; i < n; i++) p[i] /= sum;
}

// The operator `probabilities`: logits float32 [..., V] -> float32 [..., V], each row by `filter`. counts int64 [B], for
// logits [B, n, V]: only the first counts[b] of each n are computed; the others are 0.
static at::Tensor probabilities(const at::Tensor& logits, const at::Tensor& settings,
                                const std::optional<at::Tensor>& counts) {
    TORCH_CHECK(!counts || (logits.dim() == 3 && counts->numel() == logits.size(0) && counts->scalar_type() == at::kLong),
                "there must be a count for each row of logits");
    auto from = logits.contiguous(), computed = counts ? counts->contiguous() : at::Tensor();
    auto probs = counts ? untouched_zeros(logits.sizes()) : at::empty(logits.sizes(), logits.options());
    long size = logits.size(-1), rows = logits.numel() / size;
    std::vector<long> some;  // rows that are computed
    for (long row = 0; row < rows; row++)
        if (!counts || row % logits.size(1) < data<int64_t>(computed)[row / logits.size(1)]) some.push_back(row);
    together(rows > 1 && rows * size > 16384, [&](const Member& member) {
        static thread_local std::vector<float> room;
        auto p = [&](long row) { return (float*)probs.data_ptr() + row * size; };
        for (auto [i, last] = member.part(some.size()); i < last; i++)
            filter(data<float>(from) + some[i] * size, size, settings, p(some[i]), room);
    });
    return probs;
}

// The token of p[n] whose share of the cumulative sum contains u, uniform in [0, 1); n if p is nan.
static long pick_one(const float* p, long n, float u, std::vector<double>& parts) {
    constexpr long PART = 64;
    if (is_nan(p)) return n;
    parts.resize((n + PART - 1) / PART);
    double sum = 0;
    for (long i = 0; i < long(parts.size()); i++) sum += parts[i] = total(p + i * PART, std::min(PART, n - i * PART));
    double left = u * sum;
    long part = 0, token = -1;
    while (part + 1 < long(parts.size()) && left >= parts[part]) left -= parts[part++];
    for (long i = part * PART; i < n; i++) {  // Rounding can lead past the part's end.
        if (p[i] > 0) {
            token = i;
            if (left < p[i]) break;
        }
        left -= p[i];
    }
    for (long i = n - 1; token < 0 && i >= 0; i--) token = p[i] > 0 ? i : -1;
    return token < 0 ? n - 1 : token;
}

// The operator `pick`: probs float32 [..., V], u float32 [...] uniform in [0, 1) -> int64 [...], the token whose share
// of the cumulative sum contains u. A distribution that is nan gives V.
static at::Tensor pick(const at::Tensor& probs, const at::Tensor& u) {
    auto p = probs.contiguous(), at = u.contiguous();
    auto tokens = at::empty(u.sizes(), u.options().dtype(at::kLong));
    long n = probs.size(-1), rows = u.numel();
    together(rows > 1 && rows * n > 16384, [&](const Member& member) {
        static thread_local std::vector<double> parts;
        for (auto [row, last] = member.part(rows); row < last; row++)
            ((int64_t*)tokens.data_ptr())[row] = pick_one(data<float>(p) + row * n, n, data<float>(at)[row], parts);
    });
    return tokens;
}

// Refuses a draft of x [B, n] that is no token of q [B, n, V]. One that was drawn from nan may be any number.
static void check_drafts(const at::Tensor& q, const at::Tensor& x) {
    for (long i = 0, size = q.size(-1); i < x.numel(); i++)
        TORCH_CHECK_INDEX((0 <= data<int64_t>(x)[i] && data<int64_t>(x)[i] < size) || is_nan(data<float>(q) + i * size),
                          "there is no token ", data<int64_t>(x)[i], " to verify");
}

// The rules of verification.py without the last draw: p [B, n + 1, V], q [B, n, V], drafts int64 [B, n], u [B, n] ->
// how many drafts of each row are accepted, int64 [B], and the distribution of the token after them, [B, V].
// rule: f(p, q, drafts, u, n, V) of one row -> how many drafts are accepted, and the weight of p in the residual.
template <typename Rule>
static std::tuple<at::Tensor, at::Tensor> by_rule(const at::Tensor& p, const at::Tensor& q, const at::Tensor& drafts,
                                                  const at::Tensor& u, Rule rule) {
    auto ps = p.contiguous(), qs = q.contiguous(), xs = drafts.contiguous(), us = u.contiguous();
    check_drafts(qs, xs);
    long rows = p.size(0), n = drafts.size(1), size = p.size(2);
    auto accepted = at::empty({rows}, drafts.options()), left = at::empty({rows, size}, p.options());
    auto verify = [&](long row) {
        const float *p_0 = data<float>(ps) + row * (n + 1) * size, *q_0 = data<float>(qs) + row * n * size;
        auto [i, w] = rule(p_0, q_0, data<int64_t>(xs) + row * n, data<float>(us) + row * n, n, size);
        ((int64_t*)accepted.data_ptr())[row] = i;
        const float *p_i = p_0 + i * size, *q_i = q_0 + i * size;
        float* rest = (float*)left.data_ptr() + row * size;
        bool sound = !is_nan(p_i) && (i == n || !is_nan(q_i));
        for (long v = 0; sound && v < size; v++) rest[v] = i < n ? std::max(w * p_i[v] - q_i[v], 0.f) : p_i[v];
        float sum = sound ? total(rest, size) : 0;
        if (sum > 0)
            for (long v = 0; v < size; v++) rest[v] /= sum;
        else
            std::copy(p_i, p_i + size, rest);
    };
    together(rows > 1 && rows * size > 16384, [&](const Member& member) {
        for (auto [row, last] = member.part(rows); row < last; row++) verify(row);
    });
    return {accepted, left};
}

// The operator `accept`: token_rule of verification.py.
static std::tuple<at::Tensor, at::Tensor> accept(const at::Tensor& p, const at::Tensor& q, const at::Tensor& drafts,
                                                 const at::Tensor& u) {
    auto rule = [](const float* p, const float* q, const int64_t* x, const float* u, long n, long size) {
        long i = 0;
        for (; i < n; i++, p += size, q += size) {
            if (is_nan(p) || is_nan(q)) break;
            if (!(q[x[i]] > 0 && u[i] * q[x[i]] < p[x[i]])) break;
        }
        return std::pair(i, 1.f);
    };
    return by_rule(p, q, drafts, u, rule);
}

// The operator `accept_block`: block_rule of verification.py.
static std::tuple<at::Tensor, at::Tensor> accept_block(const at::Tensor& p, const at::Tensor& q,
                                                       const at::Tensor& drafts, const at::Tensor& u) {
    auto rule = [](const float* p, const float* q, const int64_t* x, const float* u, long n, long size) {
        std::pair best(0l, 1.f);
        float w = 1;
        for (long i = 0; i < n; i++) {
            if (is_nan(p + i * size) || is_nan(q + i * size) || is_nan(p + (i + 1) * size)) break;
            float q_x = q[i * size + x[i]];
            w = std::min(w * p[i * size + x[i]] / std::max(q_x, 1.1754944e-38f), 1.f);
            const float *after = p + (i + 1) * size, *guessed = q + (i + 1) * size;
            float s = 0;
            if (i + 1 == n) s = w * total(after, size);  // Past the last draft q is 0.
            else if (is_nan(guessed)) break;
            else for (long v = 0; v < size; v++) s += std::max(w * after[v] - guessed[v], 0.f);
            float h = s + 1 - w == 0 ? 1 : s / (s + 1 - w);
            if (u[i] < h && q_x > 0) best = {i + 1, w};
        }
        return best;
    };
    return by_rule(p, q, drafts, u, rule);
}
