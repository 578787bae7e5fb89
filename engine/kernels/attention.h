// Attention over the slots of a KV cache in bfloat16 or float32. Arithmetic is in float32.
#pragma once
#include "numbers.h"

constexpr int MANY = 6;          // Queries in one pass. With more, the compiler takes longer than they save.
constexpr long CHUNK = 12;       // From this many queries on it pays to pack the keys and values first.
constexpr float NEVER = -1e30f;  // The score of a masked slot, one after the query's position.

// Which slots the n queries of a row attend to, of those up to their own. Beyond the root's, query i attends to slot
// root + k if bit k of ancestors[i] is set. Bit 0 is the root. It attends to no slot before from[i].
struct Mask {
    int64_t root;
    const int64_t *ancestors, *from;  // null: the queries are no nodes of a tree; they have no window

    bool hides(long i, long slot) const { return ancestors && slot > root && !(ancestors[i] >> (slot - root) & 1); }

    // Of 16 slots from `slot` on, a bit for each that query i attends to.
    uint16_t seen(long i, long slot) const {
        long after = slot - root, hidden = from ? from[i] - slot : 0;
        uint16_t inside = hidden <= 0 ? 0xffff : hidden > 15 ? 0 : 0xffff << hidden;
        if (!ancestors || after + 15 <= 0) return inside;
        if (after >= 0) return after > 63 ? 0 : inside & uint16_t(ancestors[i] >> after);
        return inside & uint16_t(ancestors[i] << -after | ((1 << -after) - 1));
    }
};

// How scores are computed from the dot products of queries and keys.
struct Scores {
    float scale, cap = 0;  // cap: |score| stays below it; 0: there is none

    // cap tanh(scale x / cap)
    float operator()(float x) const {
        if (cap == 0) return scale * x;
        float e = expf(-std::min(std::abs(x) * scale * 2 / cap, 80.f)), y = cap * (1 - e) / (1 + e);
        // With -ffast-math std::min gives 80 for nan, which would become the cap: a number like any other.
        return is_nan(&x) ? x : x < 0 ? -y : y;
    }
#ifdef __AVX512F__
    __m512 operator()(__m512 x) const {
        x = _mm512_mul_ps(x, _mm512_set1_ps(scale));
        if (cap == 0) return x;
        auto one = _mm512_set1_ps(1), e = exponential(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2 / cap)));
        auto y = _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e)));
        return _mm512_mask_sub_ps(y, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), y);
    }
#endif
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// The mask of the first n of 32 lanes.
static inline __mmask32 first_of_32(long n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }

// A vector of 16 float32 or 32 bfloat16 numbers, as bits. Only `left` of them exist; the other lanes are 0.
static inline __m512i load(const float* x, long left) { return _mm512_maskz_loadu_epi32(first(left), x); }
static inline __m512i load(const bf16* x, long left) { return _mm512_maskz_loadu_epi16(first_of_32(left), x); }
// Numbers in a vector.
template <typename T> constexpr int LOADED = 64 / sizeof(T);

// sum + a * b in each lane. A lane of 32 bits holds one float32 number, or two bfloat16 numbers with two products.
static inline __m512 multiplied(const float*, __m512i a, __m512i b, __m512 sum) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
static inline __m512 multiplied(const bf16*, __m512i a, __m512i b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Lane j of the result is the sum of all lanes of v[j], for 16 vectors.
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

// Transposes 16 vectors: lane j of v[k] becomes lane k of v[j].
static inline void transpose(__m512i* v) {
    __m512i w[16];
#pragma GCC unroll 8
    for (int k = 0; k < 16; k += 2)
        w[k] = _mm512_unpacklo_epi32(v[k], v[k + 1]), w[k + 1] = _mm512_unpackhi_epi32(v[k], v[k + 1]);
#pragma GCC unroll 4
    for (int k = 0; k < 16; k += 4) {
        v[k] = _mm512_unpacklo_epi64(w[k], w[k + 2]), v[k + 1] = _mm512_unpackhi_epi64(w[k], w[k + 2]);
        v[k + 2] = _mm512_unpacklo_epi64(w[k + 1], w[k + 3]), v[k + 3] = _mm512_unpackhi_epi64(w[k + 1], w[k + 3]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {  // v[4 i + k] holds rows 4 i to 4 i + 3 of columns k, k + 4, k + 8, k + 12.
        auto low = _mm512_shuffle_i32x4(v[k], v[k + 4], 0x88), lower = _mm512_shuffle_i32x4(v[k], v[k + 4], 0xdd);
        auto high = _mm512_shuffle_i32x4(v[k + 8], v[k + 12], 0x88);
        auto higher = _mm512_shuffle_i32x4(v[k + 8], v[k + 12], 0xdd);
        w[k] = _mm512_shuffle_i32x4(low, high, 0x88), w[k + 8] = _mm512_shuffle_i32x4(low, high, 0xdd);
        w[k + 4] = _mm512_shuffle_i32x4(lower, higher, 0x88), w[k + 12] = _mm512_shuffle_i32x4(lower, higher, 0xdd);
    }
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) v[k] = w[k];
}

// Packs 16 slots of a head's keys, of which `left` exist: the words of 4 bytes [16][words] become to[words][SIDE].
static inline void pack_slots(const char* keys, long left, long words, char* to) {
    for (long from = 0; from < words; from += 16) {
        __m512i v[16];
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++)
            v[k] = k < left ? _mm512_maskz_loadu_epi32(first(words - from), keys + (k * words + from) * 4)
                            : _mm512_setzero_si512();
        transpose(v);
        for (int k = 0; k < std::min(16l, words - from); k++)
            _mm512_storeu_si512(to + (from + k) * SIDE * 4, v[k]);
    }
}

// s[N]: the dot products of N queries with 16 keys of D numbers, one key a lane. If fewer than 16 are left, the last one
// fills up.
template <typename T, int PARTS, int N>
static inline void score(const T (*queries)[PARTS * 32], const T* keys, long D, long left, __m512* s) {
    auto key = [&](int k) { return keys + std::min(long(k), left - 1) * D; };
    constexpr int VECTORS = PARTS * 32 / LOADED<T>;
    if (N == 1) {
        __m512 spread[16];
        __m512i query[VECTORS];
#pragma GCC unroll 16
        for (int l = 0; l < VECTORS; l++) query[l] = load(queries[0] + l * LOADED<T>, D - l * LOADED<T>);
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) {
            spread[k] = _mm512_setzero_ps();
#pragma GCC unroll 16
            for (int l = 0; l < VECTORS; l++)
                spread[k] = multiplied(keys, query[l], load(key(k) + l * LOADED<T>, D - l * LOADED<T>), spread[k]);
        }
        s[0] = sums(spread);
        return;
    }
    // With several queries it is cheaper to transpose the keys first, so that each lane belongs to one key.
    for (int i = 0; i < N; i++) s[i] = _mm512_setzero_ps();
    for (int l = 0; l < D; l += LOADED<T>) {
        __m512i v[16];
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) v[k] = load(key(k) + l, D - l);
        transpose(v);
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++)  // A lane is 4 bytes: one number or two. Those behind D are 0.
#pragma GCC unroll 12
            for (int i = 0; i < N; i++) {
                int bits;
                std::memcpy(&bits, (const char*)(queries[i] + l) + 4 * k, 4);
                s[i] = multiplied(keys, _mm512_set1_epi32(bits), v[k], s[i]);
            }
    }
}

// The softmax over the slots up to at[i] that the mask shows, for N queries: numerators in weights[N][reach], denominators
// in total[N]. next: what is read after the keys.
template <typename T, int PARTS, int N>
static void weigh(const T (*queries)[PARTS * 32], const T* keys, long D, const int64_t* at, Mask mask, long reach,
                  Scores scores, float* weights, float* total, const T* next) {
    __m512 top[N], sum[N];
    for (int i = 0; i < N; i++) top[i] = _mm512_set1_ps(NEVER), sum[i] = _mm512_setzero_ps();
    for (long j = 0; j < reach; j += 16) {
        __m512 s[N];
        ask_for(keys + j * D, 16 * D * sizeof(T), keys + reach * D, next);
        score<T, PARTS, N>(queries, keys + j * D, D, reach - j, s);
        auto there = first(reach - j);
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) {
            s[i] = _mm512_mask_mov_ps(_mm512_set1_ps(NEVER), first(at[i] + 1 - j) & mask.seen(i, j), scores(s[i]));
            top[i] = _mm512_max_ps(top[i], s[i]);
            _mm512_mask_storeu_ps(weights + i * reach + j, there, s[i]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < N; i++) top[i] = _mm512_set1_ps(_mm512_reduce_max_ps(top[i]));
    for (long j = 0; j < reach; j += 16) {
        auto there = first(reach - j);
#pragma GCC unroll 12
        for (int i = 0; i < N; i++) {
            auto s = _mm512_mask_loadu_ps(_mm512_set1_ps(2 * NEVER), there, weights + i * reach + j);
            auto e = exponential(_mm512_sub_ps(s, top[i]));
            sum[i] = _mm512_add_ps(sum[i], e);
            _mm512_mask_storeu_ps(weights + i * reach + j, there, e);
        }
    }
    for (int i = 0; i < N; i++) total[i] = _mm512_reduce_add_ps(sum[i]);
}

// `widened` reads 32 numbers at x, of which `left` exist, as two vectors of float32. Of bfloat16 numbers, y[0] gets
// those in even places and y[1] those in odd places. Of float32 numbers, y[0] gets the first 16 and y[1] the rest.
// `narrowed` is the inverse.
static inline void widened(const float* x, long left, __m512* y) {
    y[0] = _mm512_maskz_loadu_ps(first(left), x), y[1] = _mm512_maskz_loadu_ps(first(left - 16), x + 16);
}
static inline void widened(const bf16* x, long left, __m512* y) {
    auto bits = load(x, left);
    y[0] = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    y[1] = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000)));
}
static inline void narrowed(const __m512* y, long left, float* x) {
    _mm512_mask_storeu_ps(x, first(left), y[0]), _mm512_mask_storeu_ps(x + 16, first(left - 16), y[1]);
}
static inline void narrowed(const __m512* y, long left, bf16* x) {
    auto even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(y[0]));
    auto odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(y[1]));
    _mm512_mask_storeu_epi16(x, first_of_32(left), _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
}

// out[N]: the sum of the values, weighted by weights[N][reach] and divided by total[N]. The loop goes by tiles
// of slots, which stay in the processor's cache, and within a tile by parts of 32 numbers, whose accumulators stay in
// registers.
template <typename T, int PARTS, int N>
static void mix(const T* values, long D, const float* weights, const float* total, long reach, T* const* out,
                const T* next) {
    constexpr long TILE = 64;
    constexpr int WAYS = N == 1 ? 4 : N == 2 ? 2 : 1;  // Accumulators that do not wait for each other.
    __m512 sum[PARTS][N][2] = {};
    for (long from = 0; from < reach; from += TILE)
#pragma GCC unroll 1
        for (int part = 0; part < PARTS; part++) {
            __m512 acc[WAYS][N][2] = {};
            auto add = [&](long j, int way) __attribute__((always_inline)) {
                __m512 value[2];
                if (part == 0) ask_for(values + j * D, D * sizeof(T), values + reach * D, next);
                widened(values + j * D + 32 * part, D - 32 * part, value);
#pragma GCC unroll 12
                for (int i = 0; i < N; i++) {
                    auto weight = _mm512_set1_ps(weights[i * reach + j]);
                    acc[way][i][0] = _mm512_fmadd_ps(weight, value[0], acc[way][i][0]);
                    acc[way][i][1] = _mm512_fmadd_ps(weight, value[1], acc[way][i][1]);
                }
            };
            long j = from, last = std::min(from + TILE, reach);
            for (; j + WAYS <= last; j += WAYS)
#pragma GCC unroll 4
                for (int way = 0; way < WAYS; way++) add(j + way, way);
            for (; j < last; j++) add(j, 0);
            for (int i = 0; i < N; i++)
                for (int half = 0; half < 2; half++)
                    for (int way = 0; way < WAYS; way++) sum[part][i][half] += acc[way][i][half];
        }
    for (int part = 0; part < PARTS; part++)
        for (int i = 0; i < N; i++) {
            for (auto& half : sum[part][i]) half = _mm512_div_ps(half, _mm512_set1_ps(total[i]));
            narrowed(sum[part][i], D - 32 * part, out[i] + 32 * part);
        }
}
#else
static inline void pack_slots(const char* keys, long left, long words, char* to) {
    for (long w = 0; w < words; w++) {
        std::memset(to + w * SIDE * 4, 0, 16 * 4);
        for (long k = 0; k < std::min(16l, left); k++)
            std::memcpy(to + (w * SIDE + k) * 4, keys + (k * words + w) * 4, 4);
    }
}

template <typename T, int PARTS, int N>
static void weigh(const T (*queries)[PARTS * 32], const T* keys, long D, const int64_t* at, Mask mask, long reach,
                  Scores scores, float* weights, float* total, const T*) {
    float q[N][PARTS * 32];
    for (int i = 0; i < N; i++)
        for (int l = 0; l < D; l++) q[i][l] = wide(queries[i][l]);
    for (long j = 0; j < reach; j++) {
        float key[PARTS * 32];
        for (int l = 0; l < D; l++) key[l] = wide(keys[j * D + l]);
        for (int i = 0; i < N; i++) {
            float s = 0;
            for (int l = 0; l < D; l++) s += q[i][l] * key[l];
            weights[i * reach + j] = scores(s);
        }
    }
    for (int i = 0; i < N; i++) {
        float* s = weights + i * reach;
        long seen = at[i] + 1;
        float top = NEVER, sum = 0;
        for (long j = std::max<long>(mask.root + 1, 0); j < seen && mask.ancestors; j++) s[j] = mask.hides(i, j) ? NEVER : s[j];
        if (mask.from) std::fill(s, s + mask.from[i], NEVER);
        // One loop for each step: the compiler does not vectorise them together.
        const bool finite = all_finite(s, seen);  // The comparisons below pass over nan.
        for (long j = 0; j < seen; j++) top = s[j] > top ? s[j] : top;
        // Below -80 the vector library's exp computes one number at a time.
        for (long j = 0; j < seen; j++) s[j] = s[j] - top > -80 ? s[j] - top : -80;
        for (long j = 0; j < seen; j++) s[j] = expf(s[j]);
        for (long j = 0; j < seen; j++) sum += s[j];
        for (long j = seen; j < reach; j++) s[j] = 0;
        total[i] = sum;
        if (!finite) set_nan(total + i);
    }
}

template <typename T, int PARTS, int N>
static void mix(const T* values, long D, const float* weights, const float* total, long reach, T* const* out,
                const T*) {
    float sum[N][PARTS * 32] = {};
    for (long j = 0; j < reach; j++) {
        float value[PARTS * 32];
        for (int l = 0; l < D; l++) value[l] = wide(values[j * D + l]);
        for (int i = 0; i < N; i++)
            for (int l = 0; l < D; l++) sum[i][l] += weights[i * reach + j] * value[l];
    }
    for (int i = 0; i < N; i++)
        for (int l = 0; l < D; l++) narrow(sum[i][l] / total[i], out[i] + l);
}
#endif

// Tokens that lie side by side and are of one row of the KV cache.
struct Span {
    // reach: the slots that any of them attends to. first: the first of these in a layer with a window.
    long row, from, n = 0, reach = 0, first = 0;

    bool packs() const { return n >= CHUNK; }
    long blocks() const { return (reach + SIDE - 1) / SIDE; }
    template <typename T> long even() const { return (reach + PAIR<T> - 1) / PAIR<T> * PAIR<T>; }
};

// The spans of tokens of these rows, whose own slots are `at`. from: of their windows, or null.
static void find_spans(const int64_t* rows, const int64_t* at, const int64_t* from, long tokens,
                       std::vector<Span>& spans) {
    spans.clear();
    for (long m = 0; m < tokens; m++) {
        if (spans.empty() || spans.back().row != rows[m]) spans.push_back({rows[m], m, 0, 0, from ? from[m] : 0});
        Span& span = spans.back();
        span.n++, span.reach = std::max<long>(span.reach, at[m] + 1);
        if (from) span.first = std::min<long>(span.first, from[m]);
    }
}

// What the queries of some tokens attend to. Queries and results are [tokens, H, D]. Keys and values are
// [rows, G, capacity, D]: H / G heads share those of a group. A query attends to the slots of its row from from[tokens],
// if the layer has a window, up to its own, at[tokens].
template <typename T>
struct Attention {
    const std::vector<Span>& spans;
    long heads, groups, D, capacity;
    Scores scores;
    const T* queries;
    T *keys, *values, *out;
    const int64_t *at, *from, *roots, *ancestors;  // of each token; roots and ancestors of nodes of trees

    long cell(long row, long group) const { return (row * groups + group) * capacity * D; }
    long place(long m, long head) const { return (m * heads + head) * D; }
    long first_slot(const Span& span) const { return from ? span.first : 0; }
};

// A span of few queries, for `heads` heads of a group from `head` on. Their queries share the keys and values.
template <typename T, int PARTS>
static void attend_cell(const Attention<T>& a, const Span& span, long head, long heads) {
    static thread_local std::vector<float> weights;
    const long all = span.n * heads, passes = (all + MANY - 1) / MANY;
    const long in_cache = a.cell(span.row, head * a.groups / a.heads);
    for (long pass = 0; pass < passes; pass++) {
        const long before = all * pass / passes, many = all * (pass + 1) / passes - before;
        T queries[MANY][PARTS * 32], *out[MANY];
        int64_t at[MANY], from[MANY] = {}, ancestors[MANY], root = 0;
        // There is no code for five queries: the last one fills the pass up.
        const long width = many == 5 ? MANY : many;
        for (long k = 0; k < width; k++) {
            long query = before + std::min(k, many - 1);
            long m = span.from + query / heads, place = a.place(m, head + query % heads);
            std::copy_n(a.queries + place, a.D, queries[k]), std::fill(queries[k] + a.D, queries[k + 1], T(0));
            out[k] = a.out + place, at[k] = a.at[m];
            if (a.from) from[k] = a.from[m];
            if (a.roots) root = a.roots[m], ancestors[k] = a.ancestors[m];
        }
        const long skipped = *std::min_element(from, from + width);  // Slots before those that any of them attends to.
        for (long k = 0; k < width; k++) at[k] -= skipped, from[k] -= skipped;
        const long reach = *std::max_element(at, at + width) + 1, cell = in_cache + skipped * a.D;
        const Mask mask{root - skipped, a.roots ? ancestors : nullptr, a.from ? from : nullptr};
        weights.resize(std::max(weights.size(), size_t(width * reach)));
        auto run = [&]<int N>(std::integral_constant<int, N>) {
            float total[N];
            weigh<T, PARTS, N>(queries, a.keys + cell, a.D, at, mask, reach, a.scores, weights.data(), total,
                               a.values + cell);
            mix<T, PARTS, N>(a.values + cell, a.D, weights.data(), total, reach, out, a.keys + cell + a.capacity * a.D);
        };
        [&]<int... N>(std::integer_sequence<int, N...>) {
            ((width == N ? run(std::integral_constant<int, N>()) : void()), ...);
        }(std::integer_sequence<int, 1, 2, 3, 4, MANY>());
    }
}

// The part of one thread in the spans of few queries: as many products of a query and a key as that of any other. The
// heads of a group stay together if there is enough else to share out.
template <typename T, int PARTS>
static void attend_few(const Attention<T>& a, const Member& member) {
    long all = 0, cells = 0, before = 0;
    auto products = [&](const Span& span) { return span.n * (span.reach - a.first_slot(span)); };
    for (const Span& span : a.spans)
        if (!span.packs()) all += products(span) * a.heads, cells += a.groups;
    const long heads = cells >= 4 * member.full ? a.heads / a.groups : 1;
    for (const Span& span : a.spans)
        for (long head = 0; head < a.heads && !span.packs(); head += heads, before += products(span) * heads)
            if (before * member.of / all == member.number) attend_cell<T, PARTS>(a, span, head, heads);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
static inline void store_some(__m512 x, __mmask16 some, float* to) { _mm512_mask_storeu_ps(to, some, x); }
static inline void store_some(__m512 x, __mmask16 some, bf16* to) {
    _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

// y[count] = e^(scale (x - top)), rounded to T; returns the sum before rounding. top is the largest of x.
template <typename T>
static float softmax_numerators(const float* x, long count, float scale, T* y) {
    float top = NEVER;
    for (long j = 0; j < count; j++) top = x[j] > top ? x[j] : top;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    auto total = _mm512_setzero_ps();
    for (long j = 0; j < count; j += 16) {
        auto some = first(count - j);
        auto below = _mm512_sub_ps(_mm512_mask_loadu_ps(_mm512_set1_ps(2 * NEVER), some, x + j), _mm512_set1_ps(top));
        auto e = exponential(_mm512_mul_ps(below, _mm512_set1_ps(scale)));
        total = _mm512_add_ps(total, e);
        store_some(e, some, y + j);
    }
    return _mm512_reduce_add_ps(total);
#else
    // One loop for each step: the compiler does not vectorise them together.
    static thread_local std::vector<float> e;
    e.resize(std::max(e.size(), size_t(count)));
    float sum = 0;
    for (long j = 0; j < count; j++) e[j] = scale * (x[j] - top) > -80 ? scale * (x[j] - top) : -80;
    for (long j = 0; j < count; j++) e[j] = expf(e[j]);
    for (long j = 0; j < count; j++) sum += e[j];
    for (long j = 0; j < count; j++) narrow(e[j], y + j);
    if (!all_finite(x, count)) set_nan(&sum);  // The comparisons pass over nan.
    return sum;
#endif
}

// 32 slots of a head's keys from `block` on, packed as a block of the weight of a linear layer [reach, D] is:
// [D / PAIR][32][PAIR]. What is left of the last block is filled with zeros.
template <typename T>
static void pack_keys(const T* keys, long block, long reach, long D, T* packed) {
    for (long j = block * SIDE; j < (block + 1) * SIDE; j += 16)
        pack_slots((const char*)(keys + j * D), reach - j, D / PAIR<T>,
                   (char*)(packed + block * D * SIDE + j % SIDE * PAIR<T>));
}

// One pair of 32 numbers: of two slots side by side for 16-bit numbers, of one slot for others.
static inline void pack_pair(const float* one, const float*, float* to) { std::memcpy(to, one, SIDE * 4); }
static inline void pack_pair(const bf16* one, const bf16* other, bf16* to) {
    uint32_t pairs[SIDE];
    for (long l = 0; l < SIDE; l++) pairs[l] = one[l] | uint32_t(other[l]) << 16;
    std::memcpy(to, pairs, sizeof pairs);
}

// The same slots of a head's values, packed as a part of the weight of a linear layer [D, reach] is: blocks of 32 numbers,
// [D / 32][even / PAIR][32][PAIR]. What is left of the last block and the last pair is filled with zeros.
template <typename T>
static void pack_values(const T* values, long block, long reach, long even, long D, T* packed) {
    for (long part = 0; part * SIDE < D; part++)
        for (long j = block * SIDE; j < std::min(even, (block + 1) * SIDE); j += PAIR<T>) {
            long width = std::min(SIDE, D - part * SIDE);
            const T* from = values + j * D + part * SIDE;
            T* to = packed + (part * even + j) * SIDE;
            if (width == SIDE && j + PAIR<T> <= reach) {
                pack_pair(from, from + D, to);
                continue;
            }
            T rows[2][SIDE] = {};
            for (long row = 0; row < std::min(PAIR<T>, reach - j); row++)
                std::memcpy(rows[row], from + row * D, width * sizeof(T));
            pack_pair(rows[0], rows[1], to);
        }
}

// Memory that the threads share while they attend with many queries: the packed keys and values of all groups of the
// spans that are packed.
template <typename T>
struct Packed {
    std::vector<T> keys, values;
    std::vector<long> of_span;  // Slots of a group that are packed before those of this span, [spans + 1].

    // Called by one thread, before the others begin.
    void reserve(const std::vector<Span>& spans, long groups, long D) {
        of_span.assign(1, 0);
        for (const Span& span : spans) of_span.push_back(of_span.back() + (span.packs() ? span.blocks() * SIDE : 0));
        size_t slots = of_span.back() * groups;
        keys.resize(std::max(keys.size(), slots * D));
        values.resize(std::max(values.size(), slots * ((D + SIDE - 1) / SIDE * SIDE)));
    }
    bool used() const { return of_span.back() > 0; }
    // The keys and the values of a group of span s.
    T* keys_of(const Attention<T>& a, long s, long group) {
        return keys.data() + (of_span[s] * a.groups + (of_span[s + 1] - of_span[s]) * group) * a.D;
    }
    T* values_of(const Attention<T>& a, long s, long group) {
        return values.data() + (of_span[s] * a.groups + (of_span[s + 1] - of_span[s]) * group) *
                                   ((a.D + SIDE - 1) / SIDE * SIDE);
    }
};

// Queries m to m + many - 1 of a head, in a span whose keys and values are packed.
template <typename T>
static void attend_packed(const Attention<T>& a, const Span& span, const T* keys, const T* values, long head, long m,
                          long many) {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<T> weights;
    float mixed[64][SIDE], total[64];
    auto& kernel = multiply_in_use();
    const long width = span.blocks() * SIDE;
    scores.resize(std::max(scores.size(), size_t(many * width)));
    weights.resize(std::max(weights.size(), size_t(many * width)));
    const int64_t* at = a.at + m;
    const Mask mask{a.roots ? a.roots[m] : 0, a.roots ? a.ancestors + m : nullptr, a.from ? a.from + m : nullptr};
    long reach = *std::max_element(at, at + many) + 1, used = (reach + PAIR<T> - 1) / PAIR<T> * PAIR<T>;
    const long start = a.from ? *std::min_element(mask.from, mask.from + many) / SIDE * SIDE : 0;
    for (long j = start; j < reach; j += SIDE)
        kernel.run(Job<T>{many, a.queries + a.place(m, head), a.heads * a.D, keys + j * a.D, a.D, scores.data() + j, width});
    for (long k = 0; k < many; k++) {
        float* s = scores.data() + k * width;
        T* w = weights.data() + k * width;
        long seen = at[k] + 1;
        if (a.scores.cap > 0)
            for (long j = start; j < seen; j++) s[j] = a.scores(s[j]);
        for (long j = mask.root + 1; j < seen && mask.ancestors; j++) s[j] = mask.hides(k, j) ? NEVER : s[j];
        if (mask.from) std::fill(s + start, s + mask.from[k], NEVER);
        total[k] = softmax_numerators(s + start, seen - start, a.scores.cap > 0 ? 1 : a.scores.scale, w + start);
        std::fill(w + seen, w + used, T(0));
    }
    for (long part = 0; part * SIDE < a.D; part++) {
        kernel.run(Job<T>{many, weights.data() + start, width, values + (part * span.even<T>() + start) * SIDE,
                          used - start, mixed[0]});
        for (long k = 0; k < many; k++) {
            T* to = a.out + a.place(m + k, head) + part * SIDE;
            const float share = 1 / total[k];
            for (long l = 0; l < std::min(SIDE, a.D - part * SIDE); l++) narrow(mixed[k][l] * share, to + l);
        }
    }
}

// The part of one thread in the spans of many queries, as in a chunk of a prompt. They share the keys and values of a
// group. So these are packed once, and the kernel of linear layers multiplies them: scores = queries times keys,
// out = softmax(scores) times values. The threads take turns, as later queries attend to more slots.
template <typename T>
static void attend_many(const Attention<T>& a, Packed<T>& packed, const Member& member) {
    const long most = std::min(64l, multiply_in_use().most<T>());
    long turn = 0;
    auto each = [&](auto f) {
        for (size_t s = 0; s < a.spans.size(); s++)
            if (a.spans[s].packs()) f(a.spans[s], s);
    };
    each([&](const Span& span, long s) {
        for (long group = 0; group < a.groups; group++)
            for (long block = a.first_slot(span) / SIDE, cell = a.cell(span.row, group); block < span.blocks(); block++)
                if (turn++ % member.of == member.number) {
                    pack_keys(a.keys + cell, block, span.reach, a.D, packed.keys_of(a, s, group));
                    pack_values(a.values + cell, block, span.reach, span.even<T>(), a.D, packed.values_of(a, s, group));
                }
    });
    member.wait();
    each([&](const Span& span, long s) {
        const long parts = (span.n + most - 1) / most;
        for (long head = 0; head < a.heads; head++)
            for (long part = 0, group = head * a.groups / a.heads; part < parts; part++)
                if (turn++ % member.of == member.number) {
                    long i = span.n * part / parts, many = span.n * (part + 1) / parts - i;
                    attend_packed(a, span, packed.keys_of(a, s, group), packed.values_of(a, s, group), head,
                                  span.from + i, many);
                }
    });
}

// The part of one thread. `packed` was reserved for the spans, or for more of them.
template <typename T>
static void attend(const Attention<T>& a, Packed<T>& packed, const Member& member) {
    if (packed.used()) attend_many(a, packed, member);
    if (a.D <= 32) attend_few<T, 1>(a, member);
    else if (a.D <= 64) attend_few<T, 2>(a, member);
    else if (a.D <= 96) attend_few<T, 3>(a, member);
    else if (a.D <= 128) attend_few<T, 4>(a, member);
    else attend_few<T, 8>(a, member);
}
