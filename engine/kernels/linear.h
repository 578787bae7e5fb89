// Linear layers of a few tokens, or of a chunk of a prompt. Few tokens take as long as it takes to read the weight, so
// each weight is read once, from one end to the other.
//
// The rows of a weight [out, in] are packed in blocks of 32: [out / 32][in / PAIR][32][PAIR]. The 32 outputs of a block
// lie side by side in vector registers (multiply.cpp).

#pragma once
#include "multiply.h"
#include "numbers.h"

// GELU, with erf by formula 7.1.26 of Abramowitz and Stegun, whose error is at most 1.5e-7.
static inline float gelu_of(float x) {
    float z = std::abs(x) * 0.70710678f, t = 1 / (1 + 0.3275911f * z);
    float series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float tail = series * expf(-std::min(z * z, 80.f));  // Beyond 80, exp is slow and the tail is negligible.
    return 0.5f * x * (x > 0 ? 2 - tail : tail);
}

// 32 sums of a token, on a cache line of their own.
struct alignas(64) Sums {
    float of[SIDE];
};

// y[count] = sums + bias, followed by GELU if `gelu`. GELU is applied to the sum rounded to T, which is what a linear
// layer without GELU returns.
template <typename T>
static inline void finish(const Sums& sums, const Sums& bias, T* y, long count, bool gelu) {
    T whole[SIDE];
    for (long j = 0; j < SIDE; j++) narrow(sums.of[j] + bias.of[j], whole + j);
    if (gelu)
        for (long j = 0; j < SIDE; j++) narrow(gelu_of(wide(whole[j])), whole + j);
    if (count == SIDE) std::memcpy(y, whole, sizeof whole);  // A size that is known is one instruction or two.
    else std::memcpy(y, whole, count * sizeof(T));
}

// Multiplies all tokens with `blocks` blocks -> sums[blocks][tokens].
//
// A job takes as many tokens as the registers have room for. Few tokens are one job, which goes through a block from
// one end to the other. More tokens take several jobs for each part of a block, so that the part is read from memory
// once. The blocks take turns, so that the same part of x, which is in the second cache, serves all of them.
template <typename T>
static void through_blocks(const Multiply& kernel, const T* x, const T* packed, long blocks, long tokens, long in,
                           Sums* sums) {
    long jobs = (tokens + kernel.most<T>() - 1) / kernel.most<T>();
    long depth = jobs == 1 ? in : kernel.part<T>() / (SIDE * long(sizeof(T)));
    for (long from = 0; from < in; from += depth)
        for (long b = 0; b < blocks; b++)
            for (long job = 0; job < jobs; job++) {
                long first = tokens * job / jobs, last = tokens * (job + 1) / jobs;
                const T* part = packed + (b * in + from) * SIDE;
                Job<T> each{last - first, x + first * in + from, in, part, std::min(depth, in - from),
                            sums[b * tokens + first].of};
                each.add = from > 0;
                if (jobs > 1) {  // Each job prefetches its share of the next part.
                    const T* next = b + 1 < blocks ? part + in * SIDE : packed + (from + depth) * SIDE;
                    long bytes = each.in * SIDE * long(sizeof(T));
                    each.lines = 1, each.pace = (SIDE * 4 + jobs - 1) / jobs;
                    each.ahead = (next - part) * long(sizeof(T)) + bytes * job / jobs;
                }
                kernel.run(each);
            }
}

template <typename T>
static void linear(const T* x, const T* packed, const T* bias, T* y, long tokens, long in, long out, bool gelu) {
    constexpr long ROOM = 256 << 10;  // Bytes of the sums of a thread: they stay in the second cache.
    auto& kernel = multiply_in_use();
    long blocks = (out + SIDE - 1) / SIDE, most = kernel.most<T>();
    long together = tokens > most ? std::max(1l, ROOM / (tokens * long(sizeof(Sums)))) : 1;
    long work = in * SIDE * long(sizeof(T)) * ((tokens + most - 1) / most);
    at::parallel_for(0, blocks, std::max(1l, 65536 / work), [&](long first, long last) {  // Or it wakes no thread.
        static thread_local std::vector<Sums> sums;
        sums.resize(std::max(sums.size(), size_t(together * tokens)));
        for (long b = first; b < last; b += together) {
            long end = std::min(b + together, last);
            through_blocks(kernel, x, packed + b * in * SIDE, end - b, tokens, in, sums.data());
            for (long block = b; block < end; block++) {
                long count = std::min(SIDE, out - block * SIDE);
                Sums shift = {};
                for (long j = 0; bias && j < count; j++) shift.of[j] = wide(bias[block * SIDE + j]);
                for (long m = 0; m < tokens; m++)
                    finish(sums[(block - b) * tokens + m], shift, y + m * out + block * SIDE, count, gelu);
            }
        }
        kernel.done();
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
