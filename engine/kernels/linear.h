// Linear layers applied to a few tokens. They take as long as it takes to read the weight, so each weight is read once.
//
// The rows of a weight [out, in] are packed in blocks of 32: [out / 32][in / PAIR][32][PAIR]. The 32 outputs of a block
// lie side by side in vector registers. A block is read from one end to the other while up to 12 tokens are multiplied
// with it.

#pragma once
#include "numbers.h"

constexpr long SIDE = 32, MOST = 12;  // Outputs of a block; tokens multiplied with it in one pass.
template <typename T> constexpr long PAIR = 4 / sizeof(T);  // One instruction multiplies a pair of 16-bit numbers.

// M tokens x[M, in] times one block -> sums[M][32]. The accumulators stay in registers.
template <int M>
static void multiply(const float* x, const float* block, long in, float (*sums)[SIDE]) {
    float acc[M][SIDE] = {};
    for (long k = 0; k < in; k++, block += SIDE) {
        ask_for(block, 2 * 64);
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
        ask_for(block, 2 * 64);
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
        ask_for(block, 2 * 64);
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

// GELU, with erf by formula 7.1.26 of Abramowitz and Stegun, whose error is at most 1.5e-7.
static inline float gelu_of(float x) {
    float z = std::abs(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z);
    float series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float tail = series * expf(-std::min(z * z, 80.f));  // Beyond 80, exp is slow and the tail is negligible.
    return 0.5f * x * (x > 0 ? 2 - tail : tail);
}

// y[count] = sums + bias, followed by GELU if `gelu`. GELU is applied to the sum rounded to T, which is what a linear
// layer without GELU returns.
template <typename T>
static inline void finish(const float* sums, const T* bias, T* y, long count, bool gelu) {
    float z[SIDE] = {};
    T whole[SIDE];
    std::memcpy(z, sums, count * sizeof(float));
    for (long j = 0; bias && j < count; j++) z[j] += wide(bias[j]);
    for (long j = 0; j < SIDE; j++) narrow(z[j], whole + j);
    if (gelu) {
        for (long j = 0; j < SIDE; j++) z[j] = gelu_of(wide(whole[j]));
        for (long j = 0; j < SIDE; j++) narrow(z[j], whole + j);
    }
    std::memcpy(y, whole, count * sizeof(T));
}

template <typename T>
static void linear(const T* x, const T* packed, const T* bias, T* y, long tokens, long in, long out, bool gelu) {
    long passes = (tokens + MOST - 1) / MOST, blocks = (out + SIDE - 1) / SIDE;
    long worthwhile = std::max(1l, 65536 / (in * SIDE * long(sizeof(T))));  // Blocks that are worth waking a thread.
    at::parallel_for(0, blocks, worthwhile, [&](long first, long last) {
        float sums[MOST][SIDE];
        for (long b = first; b < last; b++)
            for (long pass = 0; pass < passes; pass++) {
                long from = tokens * pass / passes, to = tokens * (pass + 1) / passes;
                multiply<T>(to - from, x + from * in, packed + b * in * SIDE, in, sums);
                for (long m = from; m < to; m++)
                    finish(sums[m - from], bias ? bias + b * SIDE : nullptr, y + m * out + b * SIDE,
                           std::min(SIDE, out - b * SIDE), gelu);
            }
    });
}

// The operator `linear`: x [..., in], a weight packed as above, bias [out] or none -> [..., out], after GELU if `gelu`.
static at::Tensor linear_packed(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                                int64_t out, bool gelu) {
    auto rows = x.contiguous();
    auto shape = x.sizes().vec();
    long in = shape.back(), tokens = x.numel() / in;
    shape.back() = out;
    auto y = at::empty(shape, x.options());
    if (x.scalar_type() == at::kBFloat16)
        linear(data<bf16>(rows), data<bf16>(packed), bias ? data<bf16>(*bias) : nullptr, (bf16*)y.data_ptr(), tokens,
               in, out, gelu);
    else
        linear(data<float>(rows), data<float>(packed), bias ? data<float>(*bias) : nullptr, (float*)y.data_ptr(),
               tokens, in, out, gelu);
    return y;
}
