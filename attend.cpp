// Attention of a few tokens over the first `reach` slots of a cache kept in bfloat16 or float32; arithmetic in float32.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

static inline float wide(float x) { return x; }
static inline float wide(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// N queries of one head: scores of every slot, softmax, and the weighted sum of the values.
template <typename T, int D, int N>
static void block(const float* q, const T* keys, const T* values, const bool* mask, float* out, long out_stride,
                  long reach, float scale, float* scores) {
    for (long j = 0; j < reach; j++) {
        float key[D];
        for (int l = 0; l < D; l++) key[l] = wide(keys[j * D + l]);
        for (int i = 0; i < N; i++) {
            float s = 0;
            for (int l = 0; l < D; l++) s += q[i * D + l] * key[l];
            scores[i * reach + j] = s * scale;
        }
    }
    float total[N];
    for (int i = 0; i < N; i++) {
        float* s = scores + i * reach;
        const bool* m = mask + i * reach;
        float top = -1e30f, sum = 0;
        for (long j = 0; j < reach; j++) s[j] = m[j] ? s[j] : -1e30f;
        for (long j = 0; j < reach; j++) top = s[j] > top ? s[j] : top;
        // Beyond -80 the vector library's exp computes one number at a time.
        for (long j = 0; j < reach; j++) s[j] = s[j] - top > -80 ? s[j] - top : -80;
        for (long j = 0; j < reach; j++) s[j] = expf(s[j]);
        for (long j = 0; j < reach; j++) s[j] = m[j] ? s[j] : 0;
        for (long j = 0; j < reach; j++) sum += s[j];
        total[i] = sum;
    }
    float acc[N][D] = {};
    for (long j = 0; j < reach; j++) {
        float value[D];
        for (int l = 0; l < D; l++) value[l] = wide(values[j * D + l]);
        for (int i = 0; i < N; i++) {
            float p = scores[i * reach + j];
            for (int l = 0; l < D; l++) acc[i][l] += p * value[l];
        }
    }
    for (int i = 0; i < N; i++)
        for (int l = 0; l < D; l++) out[i * out_stride + l] = acc[i][l] / total[i];
}

template <typename T, int D>
static void attend(const float* q, const T* keys, const T* values, const bool* mask, float* out, long B, long H, long G,
                   long n, long capacity, long reach, float scale) {
#pragma omp parallel
    {
        std::vector<float> scores(4 * reach);
#pragma omp for
        for (long bh = 0; bh < B * H; bh++) {
            long b = bh / H, h = bh % H, cell = (b * G + h / (H / G)) * capacity * D;
            for (long i = 0; i < n;) {
                auto run = [&](auto f, int count) {
                    f(q + (bh * n + i) * D, keys + cell, values + cell, mask + (b * n + i) * reach,
                      out + ((b * n + i) * H + h) * D, H * D, reach, scale, scores.data());
                    i += count;
                };
                if (n - i >= 4) run(block<T, D, 4>, 4);
                else if (n - i == 3) run(block<T, D, 3>, 3);
                else if (n - i == 2) run(block<T, D, 2>, 2);
                else run(block<T, D, 1>, 1);
            }
        }
    }
}

template <typename T>
static int dispatch(const void* q, const void* k, const void* v, const void* mask, void* out, long B, long H, long G,
                    long n, long d, long capacity, long reach, float scale) {
#define CASE(D) \
    case D: attend<T, D>((const float*)q, (const T*)k, (const T*)v, (const bool*)mask, (float*)out, B, H, G, n, \
                         capacity, reach, scale); return 0;
    switch (d) { CASE(8) CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(128) CASE(256) }
    return 1;
}

extern "C" int attend_slots(const void* q, const void* k, const void* v, const void* mask, void* out, long B, long H,
                            long G, long n, long d, long capacity, long reach, float scale, int half) {
    return half ? dispatch<uint16_t>(q, k, v, mask, out, B, H, G, n, d, capacity, reach, scale)
                : dispatch<float>(q, k, v, mask, out, B, H, G, n, d, capacity, reach, scale);
}
