// Attention of a few tokens over the first `reach` slots of a cache kept in bfloat16 or float32; arithmetic in float32.
#pragma once
#include "kernelsNumbers.h"

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
