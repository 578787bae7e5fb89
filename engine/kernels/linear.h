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

// A linear layer: its weight [out, in], packed as above, and its bias [out] or none.
struct Linear {
    at::Tensor packed, bias;
    long in = 0, out = 0;
};

// x [tokens, in] times the weight, for this thread's part of the outputs: sink(block, token, sums) takes the sums of each
// block of 32 outputs. The threads get equal parts of the weight's bytes. If `pairs`, blocks 2 i and 2 i + 1 are given
// together, as sums[0] and sums[apart].
template <typename T, typename Sink>
static void multiply(const Member& member, const T* x, const Linear& layer, long tokens, bool pairs, const Sink& sink) {
    constexpr long ROOM = 256 << 10;  // Bytes of the sums of a thread: they stay in the second cache.
    static thread_local std::vector<Sums> sums;
    auto& kernel = multiply_in_use();
    const T* packed = data<T>(layer.packed);
    long blocks = (layer.out + SIDE - 1) / SIDE, most = kernel.most<T>(), unit = pairs ? 2 : 1;
    long most_blocks = tokens > most ? std::max(1l, ROOM / (tokens * unit * long(sizeof(Sums)))) * unit : unit;
    sums.resize(std::max(sums.size(), size_t(most_blocks * tokens)));
    auto [first, last] = member.part(blocks, unit);
    for (long b = first; b < last; b += most_blocks) {
        long end = std::min(b + most_blocks, last);
        through_blocks(kernel, x, packed + b * layer.in * SIDE, end - b, tokens, layer.in, sums.data());
        for (long block = b; block < end; block += unit)
            for (long m = 0; m < tokens; m++) sink(block, m, &sums[(block - b) * tokens + m], tokens);
    }
}

// Adds the bias of a block to its sums.
template <typename T>
static inline void add_bias(const Linear& layer, long block, Sums& sums) {
    if (!layer.bias.defined()) return;
    const T* bias = data<T>(layer.bias) + block * SIDE;
    long count = std::min<long>(SIDE, layer.bias.numel() - block * SIDE);
    for (long j = 0; j < count; j++) sums.of[j] += wide(bias[j]);
}

// Prefetches the beginning of this thread's part of a weight, while the thread would only wait for others.
template <typename T>
static inline void prefetch(const Member& member, const Linear& layer, bool pairs = false) {
    auto [first, last] = member.part((layer.out + SIDE - 1) / SIDE, pairs ? 2 : 1);
    const char* from = (const char*)(data<T>(layer.packed) + first * layer.in * SIDE);
    long bytes = std::min(8192l, (last - first) * layer.in * SIDE * long(sizeof(T)));
    for (long byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte);
}
