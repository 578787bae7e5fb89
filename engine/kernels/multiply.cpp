// `Multiply` for one kind of processor. loader.py compiles this file once for each kind: KIND is its name, and the flags
// say which instructions the kind has. Vectors are those of GCC and clang, which exist on every processor.
#include "multiply.h"

#include <algorithm>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int BYTES = 64, REGISTERS = 24;  // Bytes of a vector; registers that accumulators may take.
#elif defined(__AVX__)
constexpr int BYTES = 32, REGISTERS = 12;
#elif defined(__aarch64__)
constexpr int BYTES = 16, REGISTERS = 24;
#else
constexpr int BYTES = 16, REGISTERS = 8;
#endif
constexpr int LANES = BYTES / 4, VECTORS = SIDE / LANES, MOST = REGISTERS / VECTORS;

typedef float Floats __attribute__((vector_size(BYTES)));
typedef uint32_t Words __attribute__((vector_size(BYTES)));
typedef int32_t Ints __attribute__((vector_size(BYTES)));
typedef int16_t Shorts __attribute__((vector_size(BYTES)));
typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));

template <typename V> static inline V loaded(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// The number or pair of numbers at x in every lane.
static inline Words spread(const void* x) {
    uint32_t word;
    std::memcpy(&word, x, 4);
    return word - Words{};
}

// sum + w * x in each lane, for one number a lane or for a pair.
static inline Floats added(const float*, Floats sum, Words w, Words x) { return sum + (Floats)w * (Floats)x; }
static inline Floats added(const bf16*, Floats sum, Words w, Words x) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    const uint32_t high = 0xffff0000;  // A bfloat16 number is the upper half of a float32 number.
    return sum + (Floats)(w << 16) * (Floats)(x << 16) + (Floats)(w & high) * (Floats)(x & high);
#endif
}

// The job of M tokens. All sums stay in registers. With few tokens there are several sums for each output, because one
// would wait for itself. Weights are prefetched into the second cache: that leaves the first cache's few slots for misses
// to the loads. (AMD Zen 4 is as fast without it for 2 to 6 tokens, an Intel Xeon takes nearly twice as long.)
template <int M, typename T>
static void by_vectors(const Job<T>& job) {
    constexpr int WAYS = std::max(1, 8 / (M * VECTORS));
    Floats acc[WAYS][M][VECTORS] = {};
    const char* block = (const char*)job.block;
    auto step = [&](long pair, int way) __attribute__((always_inline)) {
        const char* here = block + pair * SIDE * 4;
        const char* next = here + (M == 1 ? 4096 : 8192);
        if (job.ahead) __builtin_prefetch(block + job.ahead + pair * job.pace);
        else __builtin_prefetch(next, 0, 2), __builtin_prefetch(next + 64, 0, 2);
        Words w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) w[v] = loaded<Words>(here + v * BYTES);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            Words x = spread(job.x + m * job.stride + pair * PAIR<T>);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) acc[way][m][v] = added(job.x, acc[way][m][v], w[v], x);
        }
    };
    long pair = 0, pairs = job.in / PAIR<T>;
    for (; pair + WAYS <= pairs; pair += WAYS)
#pragma GCC unroll 8
        for (int way = 0; way < WAYS; way++) step(pair + way, way);
    for (; pair < pairs; pair++) step(pair, 0);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            float* sums = job.sums + m * job.apart + v * LANES;
            Floats sum = job.add ? loaded<Floats>(sums) : Floats{};
#pragma GCC unroll 8
            for (int way = 0; way < WAYS; way++) sum += acc[way][m][v];
            std::memcpy(sums, &sum, BYTES);
        }
}

constexpr long NEAR = 32 << 10;  // Bytes that stay in the first cache beside the tokens.

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int MOST_BF16 = 6;
constexpr long CHUNK = 256, NEAR_BF16 = CHUNK * SIDE * 2;  // Inputs, and bytes of a block, that M tokens pass together.

// The job of M tokens where numbers of 16 bits are widened to be multiplied. x is widened once for all outputs. From 3
// tokens on, one half of the outputs follows the other, so that a weight in registers serves more tokens. The halves lie
// in every second cache line. What comes NEAR_BF16 bytes later is prefetched line by line, into the second cache.
template <int M> static void by_halves(const Job<bf16>& job) {
    constexpr int COUNT = M < 3 ? VECTORS : VECTORS / 2, SUMS = M * COUNT;
    constexpr int WAYS = SUMS < 8 ? 2 : 1;  // Sums for each output, because one would wait for itself.
    float x[M][CHUNK];
    const uint32_t high = 0xffff0000;
    for (long from = 0; from < job.in; from += CHUNK) {
        const long count = std::min(CHUNK, job.in - from);
        for (int m = 0; m < M; m++)
            for (long i = 0; i < count; i++) {
                uint32_t number = uint32_t(job.x[m * job.stride + from + i]) << 16;
                std::memcpy(&x[m][i], &number, 4);
            }
        const char* part = (const char*)(job.block + from * SIDE);
        const char* next = (const char*)job.block + job.ahead + from / 2 * job.pace;
        for (int first = 0; first < VECTORS; first += COUNT) {
            const char* later = part + NEAR_BF16 + count * SIDE * 2 * first / VECTORS;
            Floats acc[WAYS][M][COUNT] = {};
            if (job.add || from)
#pragma GCC unroll 6
                for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                    for (int v = 0; v < COUNT; v++)
                        acc[0][m][v] = loaded<Floats>(job.sums + m * job.apart + (first + v) * LANES);
            for (long i = 0; i < count; i += 2) {
                const char* here = part + i * SIDE * 2 + first * BYTES;
                if (!job.ahead) {
#pragma GCC unroll 2
                    for (int line = 0; line < COUNT * BYTES; line += 64)
                        __builtin_prefetch(later + i / 2 * COUNT * BYTES + line, 0, 2);
                } else if (!first) __builtin_prefetch(next + i / 2 * job.pace);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    Words w[COUNT];
                    if constexpr (SUMS == 12) asm volatile("" ::: "memory");
#pragma GCC unroll 4
                    for (int v = 0; v < COUNT; v++) w[v] = loaded<Words>(here + v * BYTES);
#pragma GCC unroll 4
                    for (int v = 0; v < COUNT; v++) w[v] = half ? w[v] & high : w[v] << 16;
#pragma GCC unroll 6
                    for (int m = 0; m < M; m++) {
                        auto& sums = acc[half % WAYS][m];
                        Words y = spread(&x[m][i + half]);
                        // -ffast-math would add up two products first, which takes more instructions and registers.
#pragma GCC unroll 4
                        for (int v = 0; v < COUNT; v++)
                            sums[v] = (Floats)_mm256_fmadd_ps((__m256)w[v], (__m256)y, (__m256)sums[v]);
                        // 12 sums leave room for one token: the compiler would read the next ones early.
                        if constexpr (SUMS == 12) asm volatile("" : "+x"(sums[0]), "+x"(sums[1]) : : "memory");
                    }
                }
            }
#pragma GCC unroll 6
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < COUNT; v++) {
                    float* sums = job.sums + m * job.apart + (first + v) * LANES;
                    Floats sum = acc[0][m][v];
                    if (WAYS == 2) sum += acc[WAYS - 1][m][v];
                    std::memcpy(sums, &sum, BYTES);
                }
        }
    }
}
#else
constexpr int MOST_BF16 = MOST;
constexpr long NEAR_BF16 = NEAR;

template <int M> static void by_halves(const Job<bf16>& job) { by_vectors<M>(job); }
#endif

template <typename T, int M = sizeof(T) == 2 ? MOST_BF16 : MOST>
static void vectors(const Job<T>& job) {
    if (job.tokens != M) {
        if constexpr (M > 1) vectors<T, M - 1>(job);
    } else if constexpr (sizeof(T) == 2) by_halves<M>(job);
    else by_vectors<M>(job);
}

// In each lane a sum of products of four unsigned bytes w, of BITS bits, with four signed bytes at x.
template <int BITS> struct Dots {
    Ints sum;

    // Adds the products of inputs 4 k to 4 k + 3 of a group. For k = 0, 1, ... 7 in turn.
#if defined(__AVX512VNNI__)
    [[gnu::always_inline]] void add(int, Words w, const int8_t* x) {
        sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)spread(x));
    }
#elif defined(__AVX2__)
    static constexpr int FIT = BITS == 5 ? 4 : BITS == 6 ? 2 : 8;  // So many sums of two products fit in 16 bits.
    Shorts pairs;

    [[gnu::always_inline]] void add(int k, Words w, const int8_t* x) {
        if constexpr (BITS == 8) {  // Of the upper seven bits one fits, of the lowest bit all.
            sum += joined(products(w >> 1 & 0x7f7f7f7fu, x), 2);
            w &= 0x01010101u;
        }
        pairs = k % FIT ? pairs + products(w, x) : products(w, x);
        if (k % FIT == FIT - 1) sum += joined(pairs, 1);
    }
#if defined(__AVX512BW__)
    static Shorts products(Words w, const int8_t* x) { return (Shorts)_mm512_maddubs_epi16((__m512i)w, (__m512i)spread(x)); }
    static Ints joined(Shorts x, short times) { return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)(times - Shorts{})); }
#else
    static Shorts products(Words w, const int8_t* x) { return (Shorts)_mm256_maddubs_epi16((__m256i)w, (__m256i)spread(x)); }
    static Ints joined(Shorts x, short times) { return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)(times - Shorts{})); }
#endif
#else
    [[gnu::always_inline]] void add(int, Words w, const int8_t* x) {
        // Two pairs of 16-bit numbers: bytes 0 and 2, bytes 1 and 3.
        const uint32_t low = 0x00ff00ff;
        auto pair = [](int8_t a, int8_t b) { return (uint32_t(uint16_t(b)) << 16 | uint16_t(a)) - Words{}; };
        auto multiplied = [](Words a, Words b) {
#if defined(__SSE2__)
            return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
            return ((Ints)(a << 16) >> 16) * ((Ints)(b << 16) >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
        };
        sum += multiplied(w & low, pair(x[0], x[2])) + multiplied((w >> 8) & low, pair(x[1], x[3]));
    }
#endif
};

// Vectors of a group that take turns, so that what they need of M tokens stays in registers, and tokens of a job.
template <int M> constexpr int TOGETHER = BYTES == 32 ? (M <= 2 ? 2 : 1) : VECTORS;
constexpr int MOST_OF_CODES = BYTES == 64 ? 9 : BYTES == 32 ? 6 : 1;

// COUNT vectors of each row of a group of a weight in BITS bits.
template <int BITS, int COUNT> struct Codes {
    static constexpr int MORE = BITS == 8 ? 0 : BITS - 4;  // rows of one bit more
    const char* rows;
    Words low[COUNT], high[MORE + 1][COUNT];

    [[gnu::always_inline]] Codes(const char* rows) : rows(rows) {
#pragma GCC unroll 2
        for (int bit = 0; bit < MORE; bit++)
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) high[bit][v] = row(4 + bit, v);
    }

    // The compiler would rather load a row again for each use, and loads are what there is least of.
    [[gnu::always_inline]] Words row(int number, int v) const {
        Words row = loaded<Words>(rows + number * SIDE * 4 + v * BYTES);
#if defined(__AVX512F__)
        asm("" : "+v"(row));
#endif
        return row;
    }

    // Weights of 4 inputs, k of 8, for the outputs of vector v: four unsigned bytes a lane. For k = 0, 1, 2, ... in turn.
    [[gnu::always_inline]] Words four(int k, int v) {
        if constexpr (BITS == 8) return row(k, v);
        if (k % 2 == 0) low[v] = row(k / 2, v);
        Words w = (k % 2 ? low[v] >> 4 : low[v]) & 0x0f0f0f0fu;
#pragma GCC unroll 2
        for (int bit = 0; bit < MORE; bit++) {  // Bit k of each byte is bit 4 + `bit` of the weight.
            Words shifted = k < 4 + bit ? high[bit][v] << (4 + bit - k) : high[bit][v] >> (k - 4 - bit);
            w |= shifted & (0x10101010u << bit);
        }
        return w;
    }
};

constexpr long AHEAD_OF_CODES = 16384;  // Bytes from what is read to what is prefetched, into the second cache.

// The job of M tokens whose weights have BITS bits.
template <int M, int BITS> static void by_codes(const CodesJob& job) {
    constexpr int COUNT = TOGETHER<M>;
    Floats acc[M][VECTORS] = {};
    const char* scales = job.block;
    const CodesJob::Group* group = job.groups;
    const int8_t* x = job.x;
    for (long g = 0; g < job.count; g++, group += M, x += M * GROUP, scales += GROUP_BYTES<BITS>) {
#pragma GCC unroll 17
        for (int line = 0; line < GROUP_BYTES<BITS>; line += 64) __builtin_prefetch(scales + AHEAD_OF_CODES + line, 0, 2);
#pragma GCC unroll 8
        for (int first = 0; first < VECTORS; first += COUNT) {
            Dots<BITS> dots[M][COUNT];
#pragma GCC unroll 16
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int v = 0; v < COUNT; v++) dots[m][v].sum = (Ints)spread(&group[m].start);
            Codes<BITS, COUNT> codes(scales + SIDE * 2 + first * BYTES);
#pragma GCC unroll BYTES / 4
            for (int k = 0; k < 8; k++) {
                Words w[COUNT];
#pragma GCC unroll 8
                for (int v = 0; v < COUNT; v++) w[v] = codes.four(k, v);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int v = 0; v < COUNT; v++) dots[m][v].add(k, w[v], x + m * GROUP + k * 4);
            }
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) {
                const char* halves = scales + (first + v) * BYTES / 2;
                Floats scale = (Floats)(__builtin_convertvector(loaded<Halves>(halves), Words) << 16);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++)
                    acc[m][first + v] += __builtin_convertvector(dots[m][v].sum, Floats) * (scale * group[m].scale);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) std::memcpy(job.sums + m * SIDE + v * LANES, &acc[m][v], BYTES);
}

template <int BITS, int M = MOST_OF_CODES>
static void of_bits(const CodesJob& job) {
    if (job.tokens == M) return by_codes<M, BITS>(job);
    if constexpr (M > 1) of_bits<BITS, M - 1>(job);
}

static void few_bits(const CodesJob& job) {
    switch (job.bits) {
        case 4: return of_bits<4>(job);
        case 5: return of_bits<5>(job);
        case 6: return of_bits<6>(job);
        case 8: return of_bits<8>(job);
    }
}

#ifdef __AMX_BF16__
constexpr long ROWS = 16;          // Rows of a tile.
constexpr long DEEP = 32;          // 16-bit numbers in a row of a tile: the part of `in` that one instruction multiplies.
constexpr long TILED = 2 * ROWS;   // Tokens of a job.
constexpr long FAR = 160 << 10;    // Bytes that stay in the second cache beside the tokens.

static thread_local long configured = 0;  // The tokens that this thread's tiles are configured for.

// Tiles 0 and 1 sum up the first 16 tokens, 2 and 3 the others; 4 and 5 hold their x, 6 and 7 the block.
static void configure(long tokens) {
    if (configured == tokens) return;
    configured = tokens;
    struct alignas(64) {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    uint8_t upper = std::min(tokens, ROWS), lower = std::max(tokens - ROWS, 1l);
    uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, ROWS, ROWS};
    for (int tile = 0; tile < 8; tile++) shape.rows[tile] = rows[tile], shape.bytes[tile] = 64;
    asm volatile("" : : "r"(&shape) : "memory");  // Or the compiler may drop what it believes nobody reads.
    _tile_loadconfig(&shape);
}

// Reads as many cache lines as a tile has, so that the loads of a later tile find them in the first cache, and prefetches
// as many for the next call.
//
// Prefetching alone is slower: a processor that is busy drops prefetches, and a tile that has to wait for memory waits
// line by line.
static inline void read_lines(const char* now, const char* later) {
#pragma GCC unroll 16
    for (long line = 0; line < ROWS; line++) __builtin_prefetch(later + 64 * line);
#pragma GCC unroll 16
    for (long line = 0; line < ROWS; line++) (void)*(const volatile int*)(now + 64 * line);
}

static void by_tiles(const Job<bf16>& job) {
    const bf16 *x = job.x, *block = job.block;
    constexpr long STEP = DEEP * SIDE * 2, HALF = STEP / 2;  // Bytes of the block.
    const char *next = (const char*)block, *last = next + (job.in / DEEP - 1) * STEP;
    const long from = job.stride * 2, to = job.apart * 4, wide = SIDE * 4;  // Bytes from row to row.
    float* lower = job.sums + ROWS * job.apart;
    const bool two = job.tokens > ROWS;
    configure(job.tokens);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (job.add) {
        _tile_loadd(0, job.sums, to);
        _tile_loadd(1, job.sums + ROWS, to);
    }
    if (job.add && two) {
        _tile_loadd(2, lower, to);
        _tile_loadd(3, lower + ROWS, to);
    }
    for (long k = 0; k + DEEP <= job.in; k += DEEP, block += DEEP * SIDE) {
        next += STEP;
        const char* now = std::min(next, last);  // What is behind the last step may not be readable.
        read_lines(now, next + HALF);
        _tile_loadd(4, x + k, from);
        _tile_loadd(6, block, wide);
        _tile_dpbf16ps(0, 4, 6);
        read_lines(now + HALF, next + STEP);
        _tile_loadd(7, block + SIDE, wide);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + ROWS * job.stride + k, from);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, job.sums, to);
    _tile_stored(1, job.sums + ROWS, to);
    if (two) {
        _tile_stored(2, lower, to);
        _tile_stored(3, lower + ROWS, to);
    }
}

// What is left of `in` after whole tiles is done by vectors, and so is a single token.
static void tiles(const Job<bf16>& job) {
    if (job.tokens == 1) return by_vectors<1>(job);
    long whole = job.in / DEEP * DEEP;
    if (whole) by_tiles(job);
    if (whole == job.in) return;
    for (long m = 0; m < job.tokens; m += MOST) {
        Job<bf16> rest = job;
        rest.tokens = std::min<long>(MOST, job.tokens - m);
        rest.x += m * job.stride + whole, rest.block += whole * SIDE, rest.in -= whole;
        rest.sums += m * job.apart, rest.add = whole || job.add;
        vectors(rest);
    }
}

static void done() {  // The operating system need not keep the tiles of this thread any more.
    if (configured) _tile_release();
    configured = 0;
}
extern const Multiply KIND = {NAME, MOST, TILED, MOST_OF_CODES, NEAR, FAR, vectors<float>, tiles, few_bits, done};
#else
static void done() {}
extern const Multiply KIND = {NAME, MOST, MOST_BF16, MOST_OF_CODES, NEAR, NEAR_BF16, vectors<float>, vectors<bf16>, few_bits, done};
#endif
