// Linear layers of a few tokens, or of a chunk of a prompt. Few tokens take as long as it takes to read the weight, so
// each weight is read once, from one end to the other.
//
// The rows of a weight [out, in] are packed in blocks of 32: [out / 32][in / PAIR][32][PAIR]. The 32 outputs of a block
// lie side by side in vector registers (multiply.cpp).
//
// A weight in few bits is a code, 0 to 2^bits - 1, of which half the range is subtracted, times the scale of its group of
// 32 inputs. Its blocks are uint8 [out / 32][in / 32][64 + ...]: the 32 scales of the group in bfloat16, and as many rows
// as a weight has bits, of 4 bytes for each output. In the first four rows, byte j of row r has the lower four bits of
// inputs 8 r + j and 8 r + 4 + j; bit k of byte j of a later row is one more bit of input 4 k + j. With 8 bits, byte j of
// row k is input 4 k + j. The inputs are rounded to int8, by groups as well.

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
                    each.pace = (SIDE * 4 + jobs - 1) / jobs;
                    each.ahead = (next - part) * long(sizeof(T)) + bytes * job / jobs;
                }
                kernel.run(each);
            }
}

// A linear layer: its weight [out, in], packed as above, and its bias [out] or none.
struct Linear {
    at::Tensor packed, bias;
    long in = 0, out = 0;

    bool quantised() const { return packed.scalar_type() == at::kByte; }
    // Bytes of a block of outputs.
    long block_bytes() const { return packed.nbytes() / packed.size(0); }
    const char* block(long number) const { return (const char*)packed.const_data_ptr() + number * block_bytes(); }
    // Of a weight in few bits, whose last group may be filled with zeros:
    long groups() const { return packed.size(1); }
    long bits() const { return (packed.size(2) - SIDE * 2) * 8 / (GROUP * SIDE); }
};

// Inputs of a layer with a weight in few bits, rounded to int8 by groups, as its jobs read them: those of one job side by
// side.
struct Rounded {
    std::vector<int8_t> x;
    std::vector<CodesJob::Group> groups;

    template <typename T> void round(const T* from, long tokens, const Linear& layer, long jobs) {
        const long count = layer.groups(), half = 1l << (layer.bits() - 1);
        x.resize(std::max(x.size(), size_t(tokens * count * GROUP)));
        groups.resize(std::max(groups.size(), size_t(tokens * count)));
        for (long job = 0; job < jobs; job++) {
            const long first = tokens * job / jobs, width = tokens * (job + 1) / jobs - first;
            for (long m = 0; m < width; m++)
                for (long g = 0; g < count; g++) {
                    const T* numbers = from + (first + m) * layer.in + g * GROUP;
                    T last[GROUP] = {};  // a group that zeros fill
                    if (long left = layer.in - g * GROUP; left < GROUP) numbers = (std::copy_n(numbers, left, last), last);
                    const long at = first * count + g * width + m;
                    int8_t* to = x.data() + at * GROUP;
                    float most = 0;
                    int32_t sum = 0;
                    for (long i = 0; i < GROUP; i++) most = std::max(most, std::abs(wide(numbers[i])));
                    const float factor = most > 0 ? 127 / most : 0;
                    for (long i = 0; i < GROUP; i++) {
                        // Adding 1.5 * 2^23 rounds to nearest, ties to even, and leaves the number in the low bits.
                        float y = wide(numbers[i]) * factor + 12582912.f;
                        int32_t bits;
                        std::memcpy(&bits, &y, 4);
                        to[i] = int8_t(bits);
                        sum += int8_t(bits);
                    }
                    groups[at] = {most / 127, int32_t(-sum * half)};
                }
        }
    }
};

// Multiplies all tokens with blocks first to last - 1 of a weight in few bits -> sums[blocks][tokens]. A block stays in
// the second cache for all jobs.
static inline void through_codes(const Multiply& kernel, const Rounded& rounded, const Linear& layer, long first, long last,
                                 long tokens, long jobs, Sums* sums) {
    const long groups = layer.groups(), bytes = layer.block_bytes(), bits = layer.bits();
    const char* block = layer.block(first);
    for (long b = first; b < last; b++, block += bytes)
        for (long job = 0; job < jobs; job++) {
            long m = tokens * job / jobs;
            kernel.codes({tokens * (job + 1) / jobs - m, rounded.x.data() + m * groups * GROUP,
                          rounded.groups.data() + m * groups, block, groups, bits, sums[(b - first) * tokens + m].of});
        }
}

// x [tokens, in] times the weight, for this thread's part of the outputs: sink(block, token, sums) takes the sums of each
// block of 32 outputs. The threads get equal parts of the weight's bytes. If `pairs`, blocks 2 i and 2 i + 1 are given
// together, as sums[0] and sums[apart].
template <typename T, typename Sink>
static void multiply(const Member& member, const T* x, const Linear& layer, long tokens, bool pairs, const Sink& sink) {
    constexpr long ROOM = 256 << 10;  // Bytes of the sums of a thread: they stay in the second cache.
    static thread_local std::vector<Sums> sums;
    static thread_local Rounded rounded;
    auto& kernel = multiply_in_use();
    const bool quantised = layer.quantised();
    long blocks = (layer.out + SIDE - 1) / SIDE, unit = pairs ? 2 : 1, most_blocks = unit;
    if (!quantised && tokens > kernel.most<T>())
        most_blocks = std::max(1l, ROOM / (tokens * unit * long(sizeof(Sums)))) * unit;
    sums.resize(std::max(sums.size(), size_t(most_blocks * tokens)));
    auto [first, last] = member.part(blocks, unit);
    const long jobs = (tokens + kernel.most_codes - 1) / kernel.most_codes;
    if (quantised && first < last) rounded.round(x, tokens, layer, jobs);
    for (long b = first; b < last; b += most_blocks) {
        long end = std::min(b + most_blocks, last);
        if (quantised) through_codes(kernel, rounded, layer, b, end, tokens, jobs, sums.data());
        else through_blocks(kernel, x, (const T*)layer.block(b), end - b, tokens, layer.in, sums.data());
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
static inline void prefetch(const Member& member, const Linear& layer, bool pairs = false) {
    auto [first, last] = member.part((layer.out + SIDE - 1) / SIDE, pairs ? 2 : 1);
    const char* from = layer.block(first);
    long bytes = std::min(8192l, (last - first) * layer.block_bytes());
    for (long byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte);
}
