/* Chapter 8: what a decoder does to each row of numbers between two matrix products, each in one pass.

PyTorch needs 8 operations for a norm in bfloat16 and 7 to turn a row by its angles; each passes over the
numbers. Here a row is read once and written once, in float32 in between. Few rows are done by one thread: to
wake a second takes longer. */

#include <math.h>

#include "c_numbers.h"

enum { ROW = 16384 }; // the longest row

typedef struct { // [num_tokens, num_heads, size] numbers, neighbours beside each other; c_rows.py has the same
    char *data;
    int64_t token, head; // strides, in numbers
} Rows;

INLINE char *at(const Rows *rows, int64_t token, int64_t head, int64_t dtype) {
    return rows->data + (token * rows->token + head * rows->head) * SIZE(dtype);
}

// out = x / rms(x), rounded, * weight: model/layers.py, RMSNorm
void rms_norm(Rows x, Rows out, const char *weight, int64_t num_tokens, int64_t num_heads, int64_t size,
              double eps, int64_t dtype, int64_t num_threads) {
    #pragma omp parallel for num_threads(num_threads) if (num_tokens * num_heads * size >= WORTH_THREADS)
    for (int64_t i = 0; i < num_tokens * num_heads; i++) {
        float room[ROW], weights[ROW], normed[ROW];
        const float *from = read_row(at(&x, i / num_heads, i % num_heads, dtype), dtype, size, size, room);
        const float *w = read_row(weight, dtype, size, size, weights);
        float sum = 0;
        #pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < size; d++) sum += from[d] * from[d];
        const float factor = 1 / sqrtf(sum / size + (float)eps);
        for (int64_t d = 0; d < size; d++) normed[d] = from[d] * factor;
        if (dtype == BFLOAT16) // is rounded before the weight is applied, too, as in RMSNorm
            for (int64_t d = 0; d < size; d++) normed[d] = from_bits((uint32_t)bfloat16(normed[d]) << 16);
        for (int64_t d = 0; d < size; d++) normed[d] *= w[d];
        write_row(at(&out, i / num_heads, i % num_heads, dtype), dtype, size, normed);
    }
}

// x itself: the pair (a, b) of numbers d and d + half becomes (a cos - b sin, b cos + a sin): model/rope.py
void apply_rotary(Rows x, const char *cosine, const char *sine, int64_t num_tokens, int64_t num_heads,
                  int64_t size, int64_t dtype, int64_t num_threads) {
    const int64_t half = size / 2;
    #pragma omp parallel for num_threads(num_threads) if (num_tokens * num_heads * size >= WORTH_THREADS)
    for (int64_t token = 0; token < num_tokens; token++) {
        float room[ROW], cosines[ROW], sines[ROW], turned[ROW];
        const float *c = read_row(cosine + token * half * SIZE(dtype), dtype, half, half, cosines);
        const float *s = read_row(sine + token * half * SIZE(dtype), dtype, half, half, sines);
        for (int64_t head = 0; head < num_heads; head++) {
            char *row = at(&x, token, head, dtype);
            const float *from = read_row(row, dtype, size, size, room);
            for (int64_t d = 0; d < half; d++) turned[d] = from[d] * c[d] - from[d + half] * s[d];
            for (int64_t d = 0; d < half; d++) turned[d + half] = from[d + half] * c[d] + from[d] * s[d];
            write_row(row, dtype, size, turned);
        }
    }
}
