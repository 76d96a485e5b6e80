/* Chapter 8: rows times a weight, out = x W^T, in C.

The weight [out_features, in_features] is kept in panels of PANEL of its rows; within a panel lies column 0 of
these rows, then column 1, and so on:

    panel 0:   w[0][0] w[1][0] .. w[15][0]   w[0][1] w[1][1] .. w[15][1]   w[0][2] ..
    panel 1:   w[16][0] ..

So a panel is one stream, read front to back. A tile of up to TILE rows of x meets it with TILE x 2 sums that
stay in registers: each number of the weight that is read serves all rows of the tile, each number of x serves
PANEL columns of the result. With many rows, DEPTH columns at a time: so much of a panel stays in a core's
cache while one tile after another meets it. The first tile waits for weights from memory, so those a little
ahead are asked for; the tiles after it ask for the columns that come next.

Each number of the result is summed in the same order whatever rows stand beside it. */

#include "c_numbers.h"

enum { VECS = 2, PANEL = VECS * LANES, TILE = 6, DEPTH = 256, MAX_ROWS = 240 };
enum { AHEAD = 2048 }; // bytes
enum { NOTHING, SWISH, ADD, MUL };

typedef struct { // c_linear.py has the same fields in the same order
    const float *x; // [num_rows, in_features], a row after x_row numbers
    char *out; // [num_rows, out_features], in dtype, contiguous
    const char *panels, *bias, *other; // bias [out_features] or NULL; other as out, a row after other_row
    int64_t num_rows, in_features, out_features, x_row, other_row, then, dtype, num_threads;
} Product;

INLINE void add_tile(const int rows, int64_t depth, const float *x, int64_t x_row, const float *weights,
                     const char *ahead, float *sums) {
    vec sum[TILE][VECS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < VECS; c++) sum[r][c] = load(sums + r * PANEL + c * LANES);
    for (int64_t k = 0; k < depth; k++) {
        vec w[VECS];
        for (int c = 0; c < VECS; c++) w[c] = load(weights + k * PANEL + c * LANES);
        for (int c = 0; c < PANEL; c += 16) __builtin_prefetch(ahead + (k * PANEL + c) * sizeof(float));
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < VECS; c++) sum[r][c] += x[r * x_row + k] * w[c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < VECS; c++) store(sums + r * PANEL + c * LANES, sum[r][c]);
}

// What comes after the product, of `n` columns of one row: a bias, silu, or a sum or product with `other`.
INLINE void finish(const Product *p, const int dtype, int64_t row, int64_t column, int64_t n, float *sums) {
    float room[PANEL], numbers[PANEL] = {0};
    if (p->bias) {
        const float *bias = read_row(p->bias + column * SIZE(dtype), dtype, n, n, room);
        for (int64_t c = 0; c < n; c++) sums[c] += bias[c];
    }
    if (p->then == SWISH) // x / (1 + e^-x), by e^-|x|, which is never too large
        for (int c = 0; c < PANEL; c++) {
            const float size = sums[c] < 0 ? sums[c] : -sums[c], e = power_of_two(size * 1.44269504f);
            sums[c] *= (sums[c] < 0 ? e : 1) / (1 + e);
        }
    if (p->then == ADD || p->then == MUL) {
        const char *from = p->other + (row * p->other_row + column) * SIZE(dtype);
        memcpy(numbers, read_row(from, dtype, n, n, room), n * sizeof(float));
        for (int c = 0; c < PANEL; c++)
            sums[c] = p->then == ADD ? sums[c] + numbers[c] : sums[c] * numbers[c];
    }
    write_row(p->out + (row * p->out_features + column) * SIZE(dtype), dtype, n, sums);
}

#define CASE(rows) case rows: add_tile(rows, depth, x, p->x_row, weights, ahead, sums + r * PANEL); break
INLINE void panel_product(const Product *p, const int dtype, int64_t panel, int64_t first, int64_t rows) {
    float sums[MAX_ROWS * PANEL], room[DEPTH * PANEL];
    memset(sums, 0, rows * PANEL * sizeof(float));
    for (int64_t k = 0; k < p->in_features; k += DEPTH) {
        const int64_t depth = min(DEPTH, p->in_features - k);
        const char *from = p->panels + (panel * p->in_features + k) * PANEL * SIZE(dtype);
        const float *weights = read_row(from, dtype, depth * PANEL, depth * PANEL, room);
        for (int64_t r = 0; r < rows; r += TILE) {
            const float *x = p->x + (first + r) * p->x_row + k;
            const char *ahead = r == 0 ? from + AHEAD : from + depth * PANEL * SIZE(dtype);
            switch (min(TILE, rows - r)) {
                CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6);
            }
        }
    }
    const int64_t column = panel * PANEL, n = min(PANEL, p->out_features - column);
    for (int64_t r = 0; r < rows; r++) finish(p, dtype, first + r, column, n, sums + r * PANEL);
}

INLINE void all_panels(const Product *p, const int dtype) {
    const int64_t parts = ceil_div(p->num_rows, MAX_ROWS), panels = ceil_div(p->out_features, PANEL);
    const int64_t work = p->num_rows * p->in_features * p->out_features;
    #pragma omp parallel for schedule(dynamic, 2) num_threads(p->num_threads) if (work >= 8 * WORTH_THREADS)
    for (int64_t i = 0; i < panels * parts; i++) {
        const int64_t first = i / panels * MAX_ROWS;
        panel_product(p, dtype, i % panels, first, min(MAX_ROWS, p->num_rows - first));
    }
}

void linear(const Product *p) {
    if (p->dtype == FLOAT32) all_panels(p, FLOAT32);
    else all_panels(p, BFLOAT16);
}

int64_t panel_size(void) { return PANEL; }
