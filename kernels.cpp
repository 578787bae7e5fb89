// What decoding on a CPU spends its time on, for the few tokens of a round: linear layers, which take as long as their
// weights take to read, attention over the slots of a cache that are filled, and sampling. Arithmetic is in float32.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint16_t bf16;

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *to = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // nan stays nan
}
template <typename T>
static const T* data(const at::Tensor& x) { return (const T*)x.const_data_ptr(); }

// ---- Linear layers.
// A weight [out, in] is kept as [out / 32][in / PAIR][32][PAIR]: 32 outputs stand side by side in vector registers, and
// a block of 32 is read from one end to the other while up to 12 tokens are multiplied with it.

constexpr long SIDE = 32, MOST = 12, AHEAD = 4096;  // outputs, tokens, bytes that are asked for before they are needed
template <typename T> constexpr long PAIR = 4 / sizeof(T);  // 16-bit numbers are multiplied two by two

static inline void ask_for(const void* block) {
    __builtin_prefetch((const char*)block + AHEAD);
    __builtin_prefetch((const char*)block + AHEAD + 64);
}

template <int M>  // M tokens x[M, in] times one block; sums[M][32]
static void multiply(const float* x, const float* block, long in, float (*sums)[SIDE]) {
    float acc[M][SIDE] = {};
    for (long k = 0; k < in; k++, block += SIDE) {
        ask_for(block);
        for (int m = 0; m < M; m++)
            for (int j = 0; j < SIDE; j++) acc[m][j] += x[m * in + k] * block[j];
    }
    std::memcpy(sums, acc, sizeof acc);
}

template <int M>
static void multiply(const bf16* x, const bf16* block, long in, float (*sums)[SIDE]) {
#ifdef __AVX512BF16__
    __m512 acc[M][2];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (long k = 0; k < in; k += 2, block += 2 * SIDE) {
        ask_for(block);
        auto low = (__m512bh)_mm512_loadu_si512(block), high = (__m512bh)_mm512_loadu_si512(block + SIDE);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            int pair;
            std::memcpy(&pair, x + m * in + k, 4);
            auto both = (__m512bh)_mm512_set1_epi32(pair);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], low, both);
            acc[m][1] = _mm512_dpbf16_ps(acc[m][1], high, both);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        _mm512_storeu_ps(sums[m], acc[m][0]);
        _mm512_storeu_ps(sums[m] + SIDE / 2, acc[m][1]);
    }
#else
    float acc[M][SIDE] = {};
    for (long k = 0; k < in; k += 2, block += 2 * SIDE) {
        ask_for(block);
        for (int m = 0; m < M; m++) {
            float first = wide(x[m * in + k]), second = wide(x[m * in + k + 1]);
            for (int j = 0; j < SIDE; j++) acc[m][j] += first * wide(block[2 * j]) + second * wide(block[2 * j + 1]);
        }
    }
    std::memcpy(sums, acc, sizeof acc);
#endif
}

template <typename T>
static void multiply(long tokens, const T* x, const T* block, long in, float (*sums)[SIDE]) {
#define CASE(M) case M: return multiply<M>(x, block, in, sums);
    switch (tokens) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

template <typename T>
static void linear(const T* x, const T* packed, const T* bias, T* y, long tokens, long in, long out) {
    long passes = (tokens + MOST - 1) / MOST, blocks = (out + SIDE - 1) / SIDE;
    long worthwhile = std::max(1l, 65536 / (in * SIDE * long(sizeof(T))));  // blocks for which a thread is woken
    at::parallel_for(0, blocks, worthwhile, [&](long first, long last) {
        float sums[MOST][SIDE];
        for (long b = first; b < last; b++)
            for (long pass = 0; pass < passes; pass++) {
                long from = tokens * pass / passes, to = tokens * (pass + 1) / passes;
                multiply<T>(to - from, x + from * in, packed + b * in * SIDE, in, sums);
                for (long m = from; m < to; m++)
                    for (long j = 0; j < std::min(SIDE, out - b * SIDE); j++)
                        narrow(sums[m - from][j] + (bias ? wide(bias[b * SIDE + j]) : 0), y + m * out + b * SIDE + j);
            }
    });
}

// x [..., in], packed as above, bias [out] or none -> [..., out]
static at::Tensor linear_packed(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                int64_t out) {
    auto rows = x.contiguous();
    auto shape = x.sizes().vec();
    long in = shape.back(), tokens = x.numel() / in;
    shape.back() = out;
    auto y = at::empty(shape, x.options());
    if (x.scalar_type() == at::kBFloat16)
        linear(data<bf16>(rows), data<bf16>(packed), bias ? data<bf16>(*bias) : nullptr, (bf16*)y.data_ptr(), tokens,
               in, out);
    else
        linear(data<float>(rows), data<float>(packed), bias ? data<float>(*bias) : nullptr, (float*)y.data_ptr(),
               tokens, in, out);
    return y;
}

// ---- Attention of a few tokens over the first `reach` slots of a cache kept in bfloat16 or float32.

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Lane j of the result is the sum of all lanes of v[j].
static inline __m512 sums(const __m512* v) {
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++)
        a[k] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * k], v[2 * k + 1]), _mm512_unpackhi_ps(v[2 * k], v[2 * k + 1]));
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        auto x = _mm512_castps_pd(a[2 * k]), y = _mm512_castps_pd(a[2 * k + 1]);
        b[k] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    auto join = [](__m512 x, __m512 y) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    };
    c[0] = join(b[0], b[1]), c[1] = join(b[2], b[3]);
    return join(c[0], c[1]);
}

// query . key for D numbers of each, the sum still spread over the lanes.
template <int D>
static inline __m512 product(const float* query, const float* key) {
    auto sum = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int l = 0; l < D; l += 16) {
        auto mask = __mmask16(D - l >= 16 ? 0xffff : (1 << (D - l)) - 1);
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, query + l), _mm512_maskz_loadu_ps(mask, key + l), sum);
    }
    return sum;
}

template <int D>
static inline __m512 product(const bf16* query, const bf16* key) {
    auto sum = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int l = 0; l < D; l += 32) {
        auto mask = __mmask32(D - l >= 32 ? ~0u : (1u << (D - l)) - 1);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(mask, query + l),
                               (__m512bh)_mm512_maskz_loadu_epi16(mask, key + l));
    }
    return sum;
}

// scores[N][reach]: scale times each of N queries with each of the keys, 16 keys at a time.
template <typename T, int D, int N>
static void score(const T* queries, const T* keys, long reach, float scale, float* scores) {
    for (long j = 0; j < reach; j += 16) {
        auto mask = __mmask16(reach - j >= 16 ? 0xffff : (1 << (reach - j)) - 1);
        for (int i = 0; i < N; i++) {
            __m512 spread[16];
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++)  // past the last key it is the last one again, and not stored
                spread[k] = product<D>(queries + i * D, keys + std::min(j + k, reach - 1) * D);
            _mm512_mask_storeu_ps(scores + i * reach + j, mask, _mm512_mul_ps(sums(spread), _mm512_set1_ps(scale)));
        }
    }
}

static inline __m512 widened(__mmask16 mask, const float* x) { return _mm512_maskz_loadu_ps(mask, x); }
static inline __m512 widened(__mmask16 mask, const bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

// out[N][D]: the sums of the values, weighted by weights[N][reach]. In tiles of slots, which stay at hand while one part
// of 32 numbers after the other is summed in registers.
template <typename T, int D, int N>
static void mix(const T* values, const float* weights, long reach, float (*out)[D]) {
    constexpr long TILE = 64;
    for (long first = 0; first < reach; first += TILE) {
        long last = std::min(first + TILE, reach);
#pragma GCC unroll 1
        for (int l = 0; l < D; l += 32) {
            auto lows = __mmask16(D - l >= 16 ? 0xffff : (1 << (D - l)) - 1);
            auto highs = __mmask16(D - l >= 32 ? 0xffff : D - l > 16 ? (1 << (D - l - 16)) - 1 : 0);
            __m512 low[N], high[N];
#pragma GCC unroll 5
            for (int i = 0; i < N; i++) {
                low[i] = first ? _mm512_maskz_loadu_ps(lows, out[i] + l) : _mm512_setzero_ps();
                high[i] = first ? _mm512_maskz_loadu_ps(highs, out[i] + l + 16) : _mm512_setzero_ps();
            }
            for (long j = first; j < last; j++) {
                auto x = widened(lows, values + j * D + l), y = widened(highs, values + j * D + l + 16);
#pragma GCC unroll 5
                for (int i = 0; i < N; i++) {
                    auto weight = _mm512_set1_ps(weights[i * reach + j]);
                    low[i] = _mm512_fmadd_ps(weight, x, low[i]), high[i] = _mm512_fmadd_ps(weight, y, high[i]);
                }
            }
#pragma GCC unroll 5
            for (int i = 0; i < N; i++) {
                _mm512_mask_storeu_ps(out[i] + l, lows, low[i]);
                _mm512_mask_storeu_ps(out[i] + l + 16, highs, high[i]);
            }
        }
    }
}
#else
template <typename T, int D, int N>
static void score(const T* queries, const T* keys, long reach, float scale, float* scores) {
    float q[N][D];
    for (int i = 0; i < N; i++)
        for (int l = 0; l < D; l++) q[i][l] = wide(queries[i * D + l]);
    for (long j = 0; j < reach; j++) {
        float key[D];
        for (int l = 0; l < D; l++) key[l] = wide(keys[j * D + l]);
        for (int i = 0; i < N; i++) {
            float s = 0;
            for (int l = 0; l < D; l++) s += q[i][l] * key[l];
            scores[i * reach + j] = s * scale;
        }
    }
}

template <typename T, int D, int N>
static void mix(const T* values, const float* weights, long reach, float (*out)[D]) {
    std::memset(out, 0, N * D * sizeof(float));
    for (long j = 0; j < reach; j++) {
        float value[D];
        for (int l = 0; l < D; l++) value[l] = wide(values[j * D + l]);
        for (int i = 0; i < N; i++)
            for (int l = 0; l < D; l++) out[i][l] += weights[i * reach + j] * value[l];
    }
}
#endif

// N queries of one head: scores of every slot, softmax, and the weighted sum of the values.
template <typename T, int D, int N>
static void block(const T* queries, const T* keys, const T* values, const bool* mask, T* out, long out_stride,
                  long reach, float scale, float* scores) {
    score<T, D, N>(queries, keys, reach, scale, scores);
    float total[N];
    for (int i = 0; i < N; i++) {
        float* s = scores + i * reach;
        const bool* m = mask + i * reach;
        float top = -1e30f, sum = 0;
        // A pass for each step: together they would not be computed in vectors.
        for (long j = 0; j < reach; j++) s[j] = m[j] ? s[j] : -1e30f;
        for (long j = 0; j < reach; j++) top = s[j] > top ? s[j] : top;
        // Beyond -80 the vector library's exp computes one number at a time.
        for (long j = 0; j < reach; j++) s[j] = s[j] - top > -80 ? s[j] - top : -80;
        for (long j = 0; j < reach; j++) s[j] = expf(s[j]);
        for (long j = 0; j < reach; j++) s[j] = m[j] ? s[j] : 0;
        for (long j = 0; j < reach; j++) sum += s[j];
        total[i] = sum;
    }
    float acc[N][D];
    mix<T, D, N>(values, scores, reach, acc);
    for (int i = 0; i < N; i++)
        for (int l = 0; l < D; l++) narrow(acc[i][l] / total[i], out + i * out_stride + l);
}

template <typename T, int D>
static void attend(const T* q, const T* keys, const T* values, const bool* mask, T* out, long rows, long heads,
                   long groups, long n, long capacity, long reach, float scale) {
    at::parallel_for(0, rows * heads, 1, [&](long first, long last) {
        std::vector<float> scores(5 * reach);
        long passes = (n + 4) / 5;
        for (long bh = first; bh < last; bh++) {
            long b = bh / heads, h = bh % heads, cell = (b * groups + h / (heads / groups)) * capacity * D;
            for (long pass = 0; pass < passes; pass++) {
                long i = n * pass / passes, many = n * (pass + 1) / passes - i;
                auto run = [&](auto f) {
                    f(q + (bh * n + i) * D, keys + cell, values + cell, mask + (b * n + i) * reach,
                      out + ((b * n + i) * heads + h) * D, heads * D, reach, scale, scores.data());
                };
                if (many == 5) run(block<T, D, 5>);
                else if (many == 4) run(block<T, D, 4>);
                else if (many == 3) run(block<T, D, 3>);
                else if (many == 2) run(block<T, D, 2>);
                else run(block<T, D, 1>);
            }
        }
    });
}

// states [B, G, n, d] to the slots [B, n] of kept [B, G, capacity, d]
template <typename T>
static void store(const at::Tensor& states, const at::Tensor& slots, const at::Tensor& kept) {
    auto from = states.to(kept.scalar_type()).contiguous(), at = slots.contiguous();
    long groups = kept.size(1), capacity = kept.size(2), d = kept.size(3), n = slots.size(1);
    for (long b = 0; b < kept.size(0); b++)
        for (long g = 0; g < groups; g++)
            for (long i = 0; i < n; i++)
                std::memcpy((T*)kept.data_ptr() + ((b * groups + g) * capacity + data<int64_t>(at)[b * n + i]) * d,
                            data<T>(from) + ((b * groups + g) * n + i) * d, d * sizeof(T));
}

// The tokens' keys and values [B, G, n, d] go to the slots [B, n] of the cache, kept_keys and kept_values
// [B, G, capacity, d]; then query [B, H, n, d] attends to it under mask bool [B, 1, n, reach] -> [B, n, H, d].
static at::Tensor attend_slots(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                               const at::Tensor& slots, const at::Tensor& kept_keys, const at::Tensor& kept_values,
                               const at::Tensor& mask, double scale) {
    auto q = query.to(kept_keys.scalar_type()).contiguous(), m = mask.contiguous();
    long rows = q.size(0), heads = q.size(1), n = q.size(2), d = q.size(3);
    auto out = at::empty({rows, n, heads, d}, q.options());
    auto run = [&]<typename T>(T) {
        store<T>(keys, slots, kept_keys);
        store<T>(values, slots, kept_values);
#define CASE(D) case D: return attend<T, D>(data<T>(q), data<T>(kept_keys), data<T>(kept_values), data<bool>(m), \
        (T*)out.data_ptr(), rows, heads, kept_keys.size(1), n, kept_keys.size(2), m.size(3), float(scale));
        switch (d) { CASE(8) CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(128) CASE(256) }
#undef CASE
        TORCH_CHECK(false, "no kernel for heads of ", d, " numbers");
    };
    if (kept_keys.scalar_type() == at::kBFloat16) run(bf16());
    else run(float());
    return out.to(query.scalar_type());
}

// ---- Sampling: utils.py says what these compute.

static int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// As a whole number: the compiler takes every float for finite. A distribution is nan in all its numbers or in none.
static bool is_nan(const float* x) { return (bits_of(*x) & 0x7fffffff) > 0x7f800000; }

static float total(const float* x, long n) {
    float sum = 0;
    for (long i = 0; i < n; i++) sum += x[i];
    return sum;
}

// The least value kept by top-k. k parts of the row have a largest value of at least that of the k-th of them, so that
// what is less need not be looked at.
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
    room.clear();
    for (long i = 0; i < n; i++)
        if (x[i] >= bound) room.push_back(x[i]);
    std::nth_element(room.begin(), room.begin() + (k - 1), room.end(), std::greater<float>());
    return room[k - 1];
}

// The probability with which top_p is reached when the most probable come first. They are summed by their leading bits,
// which sorts them roughly; only those of the one bucket in which top_p is reached are sorted.
static float least_kept(const float* p, long n, double top_p, std::vector<float>& room) {
    constexpr int DROPPED = 20, BUCKETS = (0x3f800000 >> DROPPED) + 2;  // probabilities are at most 1, and a rounding
    double sums[BUCKETS] = {}, above = 0;
    auto bucket = [](float x) { return bits_of(x) >> DROPPED; };
    for (long i = 0; i < n; i++)
        if (p[i] > 0) sums[bucket(p[i])] += p[i];
    int last = BUCKETS - 1;
    while (last > 0 && above + sums[last] < top_p) above += sums[last--];
    room.clear();
    for (long i = 0; i < n; i++)
        if (bucket(p[i]) == last) room.push_back(p[i]);
    if (room.empty()) return 0;  // rounding: all together do not reach top_p
    std::sort(room.begin(), room.end(), std::greater<float>());
    for (float x : room)
        if ((above += x) >= top_p) return x;
    return room.back();
}

// logits float32 [..., V], settings float64 [3]: temperature, top_k (0: all), top_p (1: all) -> float32 [..., V]
static at::Tensor probabilities(const at::Tensor& logits, const at::Tensor& settings) {
    double temperature = data<double>(settings)[0], top_p = data<double>(settings)[2];
    long top_k = long(std::min(data<double>(settings)[1], 1e15));
    auto from = logits.contiguous();
    auto probs = at::empty(logits.sizes(), logits.options());
    long n = logits.size(-1), rows = logits.numel() / n;
    at::parallel_for(0, rows, std::max(1l, 16384 / n), [&](long first, long last) {
        std::vector<float> room, e;
        for (long row = first; row < last; row++) {
            const float* x = data<float>(from) + row * n;
            float* p = (float*)probs.data_ptr() + row * n;
            int wrong = 0;  // +inf and nan. As whole numbers: the compiler takes every float for finite
            for (long i = 0; i < n; i++)
                wrong |= int(bits_of(x[i]) == 0x7f800000) | int((bits_of(x[i]) & 0x7fffffff) > 0x7f800000);
            if (wrong) {
                uint32_t nan = 0x7fc00000;
                for (long i = 0; i < n; i++) std::memcpy(p + i, &nan, 4);
                continue;
            }
            if (temperature == 0) {
                std::fill(p, p + n, 0.f);
                p[std::max_element(x, x + n) - x] = 1;
                continue;
            }
            float heat = float(1 / temperature), top = x[0];
            float floor = 0 < top_k && top_k < n ? kth_largest(x, n, top_k, room) : -INFINITY;
            for (long i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
            // In whole vectors: what is left over would be computed by another exp, and equal logits be told apart.
            e.assign((n + 15) / 16 * 16, 0);
            for (long i = 0; i < n; i++) e[i] = std::max((x[i] - top) * heat, -87.f);  // beyond, exp is slow, and 0
            for (size_t i = 0; i < e.size(); i++) e[i] = expf(e[i]);
            for (long i = 0; i < n; i++) p[i] = x[i] < floor || (x[i] - top) * heat < -87.f ? 0 : e[i];
            float scale = 1 / total(p, n);
            for (long i = 0; i < n; i++) p[i] *= scale;
            if (top_p >= 1) continue;
            float least = least_kept(p, n, top_p, room);
            for (long i = 0; i < n; i++) p[i] = p[i] < least ? 0 : p[i];
            scale = 1 / total(p, n);
            for (long i = 0; i < n; i++) p[i] *= scale;
        }
    });
    return probs;
}

// probs float32 [..., V], u float32 [...] uniform in [0, 1) -> int64 [...]: the token in whose share of the sum u lies
static at::Tensor pick(const at::Tensor& probs, const at::Tensor& u) {
    auto p = probs.contiguous(), at = u.contiguous();
    auto tokens = at::empty(u.sizes(), u.options().dtype(at::kLong));
    constexpr long PART = 64;
    long n = probs.size(-1);
    std::vector<double> parts((n + PART - 1) / PART);
    for (long row = 0; row < u.numel(); row++) {
        const float* x = data<float>(p) + row * n;
        if (is_nan(x)) {
            ((int64_t*)tokens.data_ptr())[row] = n;
            continue;
        }
        double sum = 0;
        for (long i = 0; i < long(parts.size()); i++)
            sum += parts[i] = total(x + i * PART, std::min(PART, n - i * PART));
        double left = data<float>(at)[row] * sum;
        long part = 0, token = -1;
        while (part + 1 < long(parts.size()) && left >= parts[part]) left -= parts[part++];
        for (long i = part * PART; i < n; i++) {  // past the part's end where rounding has it so
            if (x[i] > 0) {
                token = i;
                if (left < x[i]) break;
            }
            left -= x[i];
        }
        for (long i = n - 1; token < 0 && i >= 0; i--) token = x[i] > 0 ? i : -1;
        ((int64_t*)tokens.data_ptr())[row] = token < 0 ? n - 1 : token;
    }
    return tokens;
}

// verification.py's token rule but for the last draw: p [B, n + 1, V], q [B, n, V], drafts int64 [B, n], u [B, n] ->
// how many drafts of each row stand, int64 [B], and what the token after them is drawn from, [B, V]
static std::tuple<at::Tensor, at::Tensor> accept(const at::Tensor& p, const at::Tensor& q, const at::Tensor& drafts,
                                                 const at::Tensor& u) {
    auto ps = p.contiguous(), qs = q.contiguous(), xs = drafts.contiguous(), us = u.contiguous();
    long rows = p.size(0), n = drafts.size(1), size = p.size(2);
    auto accepted = at::empty({rows}, drafts.options()), left = at::empty({rows, size}, p.options());
    for (long row = 0; row < rows; row++) {
        const float *p_i = data<float>(ps) + row * (n + 1) * size, *q_i = data<float>(qs) + row * n * size;
        long i = 0;
        for (; i < n; i++, p_i += size, q_i += size) {
            long x = data<int64_t>(xs)[row * n + i];
            if (is_nan(p_i) || is_nan(q_i)) break;
            if (!(q_i[x] > 0 && data<float>(us)[row * n + i] * q_i[x] < p_i[x])) break;
        }
        ((int64_t*)accepted.data_ptr())[row] = i;
        float* rest = (float*)left.data_ptr() + row * size;
        bool sound = !is_nan(p_i) && (i == n || !is_nan(q_i));
        for (long v = 0; sound && v < size; v++) rest[v] = i < n ? std::max(p_i[v] - q_i[v], 0.f) : p_i[v];
        float sum = sound ? total(rest, size) : 0;
        if (sum > 0)
            for (long v = 0; v < size; v++) rest[v] /= sum;
        else
            std::copy(p_i, p_i + size, rest);
    }
    return {accepted, left};
}

TORCH_LIBRARY(native, library) {
    library.def("linear(Tensor x, Tensor packed, Tensor? bias, int width) -> Tensor");
    library.def("attend(Tensor query, Tensor keys, Tensor values, Tensor slots, Tensor(a!) kept_keys, "
                "Tensor(b!) kept_values, Tensor mask, float scale) -> Tensor");
    library.def("probabilities(Tensor logits, Tensor settings) -> Tensor");
    library.def("pick(Tensor probs, Tensor u) -> Tensor");
    library.def("accept(Tensor p, Tensor q, Tensor drafts, Tensor u) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(native, CPU, library) {
    library.impl("linear", linear_packed);
    library.impl("attend", attend_slots);
    library.impl("probabilities", probabilities);
    library.impl("pick", pick);
    library.impl("accept", accept);
}
