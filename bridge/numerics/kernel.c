/* The quantisation pass of tiles.py, the largest magnitude and the Hadamard transform, in one sweep over memory each.
 *
 * tiles.py and grid.py define the results; this file gives the same bits. What that rests on:
 *   - every operation is one IEEE operation in FP32: no -ffast-math (it would also flush subnormals for the whole
 *     process) and no contraction into fused multiply-adds;
 *   - magnitudes are compared as integers, which orders them correctly and lets NaN be skipped;
 *   - random numbers depend on position and seed alone, so threads do not change them.
 *
 * A panel is one band of tile_rows rows, at most PANEL columns wide: read twice, the second time from cache.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define PANEL 512
#define ALWAYS static inline __attribute__((always_inline))

enum { FP32, BF16, FP16 };
enum { GIVEN, FROM_AMAX, E8M0, NVFP4 };

typedef struct {
    const void *x;            /* rows x columns, contiguous */
    void *out;                /* uint8 codes, or BF16 operand values */
    void *scale_inv;          /* per tile: float, or uint8 for E8M0 and NVFP4; unused with GIVEN */
    int64_t rows, columns, tile_rows, tile_columns;
    uint64_t seed;
    int32_t dtype, rule, codes, stochastic, power_of_two, threads, measure;
    int32_t mantissa_bits, min_exponent, bias, bits, nan_code, nan_bits; /* without NaN: those of +max */
    float max, max_inv, eps, on_overflow, scale, shift;
    float amax, smallest, largest; /* results */
} pass;

ALWAYS float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
ALWAYS uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

ALWAYS float load(const void *x, int64_t i, const int dtype) {
    if (dtype == FP32) return ((const float *)x)[i];
    uint32_t half = ((const uint16_t *)x)[i];
    if (dtype == BF16) return as_float(half << 16);
    /* FP16: shift exponent and mantissa into place, then correct the bias by a multiplication, exact for subnormals */
    uint32_t magnitude = half & 0x7FFF;
    float scaled = as_float(magnitude << 13) * 0x1p112f;
    scaled = magnitude >= 0x7C00 ? as_float(0x7F800000 | (magnitude << 13)) : scaled;
    return as_float(as_bits(scaled) | (half & 0x8000) << 16);
}

ALWAYS uint16_t bf16(float x) { /* round to nearest even */
    uint32_t bits = as_bits(x);
    uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    rounded = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : rounded;
    return (uint16_t)(rounded >> 16);
}

ALWAYS uint32_t hash(uint32_t x) { /* lowbias32, as in grid.py */
    x ^= x >> 16; x *= 0x7FEB352Du; x ^= x >> 15; x *= 0x846CA68Bu; return x ^ (x >> 16);
}

ALWAYS float unit(uint64_t index, uint64_t seed) {
    uint32_t mixed = hash((uint32_t)index ^ (uint32_t)seed);
    mixed = hash(mixed ^ (uint32_t)(seed >> 32) ^ (uint32_t)(index >> 32));
    return (float)(int32_t)(mixed >> 16) * 0x1p-16f;
}

typedef struct { uint32_t floor_bits, anchor; float max; } grid;

/* Magnitude of x on the grid: (|x| + 2^k) - 2^k with the step of |x|'s binade, see grid.py. */
ALWAYS float nearest(float x, const grid g) {
    float magnitude = fabsf(x);
    magnitude = magnitude > g.max ? g.max : magnitude;
    uint32_t exponent = as_bits(magnitude) & 0x7F800000;
    exponent = exponent < g.floor_bits ? g.floor_bits : exponent;
    float anchor = as_float(exponent + g.anchor);
    return (magnitude + anchor) - anchor;
}

ALWAYS float random_neighbour(float x, const grid g, uint32_t mantissa_bits, float u) {
    float magnitude = fabsf(x);
    magnitude = magnitude > g.max ? g.max : magnitude;
    uint32_t exponent = as_bits(magnitude) & 0x7F800000;
    exponent = exponent < g.floor_bits ? g.floor_bits : exponent;
    float step = as_float(exponent - (mantissa_bits << 23)), inverse = as_float(((254 + mantissa_bits) << 23) - exponent);
    return floorf(magnitude * inverse + u) * step;
}

ALWAYS grid grid_of(int32_t mantissa_bits, int32_t min_exponent, float max) {
    grid g = {(uint32_t)(127 + min_exponent) << 23, (uint32_t)(23 - mantissa_bits) << 23, max};
    return g;
}

/* One row: scale, round, and store codes or operand values. NaN becomes `nan_code`, of which `nan_bits` is the value.
 * An operand value is exact in BF16, so its lower half is cut off rather than rounded. */
ALWAYS void store_row(const pass *p, const void *restrict x, void *restrict out, int64_t at, int n,
                      const float *restrict scale, const float *restrict back, const int dtype, const int codes,
                      const int stochastic) {
    const grid g = grid_of(p->mantissa_bits, p->min_exponent, p->max);
    const int m = p->mantissa_bits, sign_shift = 32 - p->bits;
    const uint64_t seed = p->seed;
    const uint32_t nan_bits = (uint32_t)p->nan_bits, nan_code = (uint32_t)p->nan_code;
    const int32_t rebias = (127 - p->bias) << m;
    const float normal = as_float(g.floor_bits), steps = as_float((uint32_t)(127 + m - p->min_exponent) << 23);
    uint8_t *restrict code = (uint8_t *)out + at;
    uint16_t *restrict value = (uint16_t *)out + at;
    for (int c = 0; c < n; c++) {
        const float y = load(x, at + c, dtype) * scale[c];
        const float r = stochastic ? random_neighbour(y, g, (uint32_t)m, unit((uint64_t)(at + c), seed)) : nearest(y, g);
        const int is_nan = (as_bits(y) & 0x7FFFFFFF) > 0x7F800000;
        const uint32_t sign = is_nan ? 0 : as_bits(y) & 0x80000000;
        if (codes) {
            const int32_t small = (int32_t)(r * steps), large = (int32_t)(as_bits(r) >> (23 - m)) - rebias;
            const uint32_t bits = (uint32_t)(r < normal ? small : large) | sign >> sign_shift;
            code[c] = (uint8_t)(is_nan ? nan_code : bits);
        } else {
            value[c] = (uint16_t)(as_bits(as_float((is_nan ? nan_bits : as_bits(r)) | sign) * back[c]) >> 16);
        }
    }
}

/* Largest magnitude per column, as bits of the input's own type, NaN as 0. */
ALWAYS void column_amax(const void *x, int64_t at, int64_t stride, int rows, int n, uint32_t *wide, uint16_t *narrow,
                        const int dtype) {
    const uint16_t infinity = dtype == BF16 ? 0x7F80 : 0x7C00;
    memset(wide, 0, sizeof(uint32_t) * (size_t)n);
    memset(narrow, 0, sizeof(uint16_t) * (size_t)n);
    for (int r = 0; r < rows; r++, at += stride) {
        for (int c = 0; c < n; c++) {
            if (dtype == FP32) {
                uint32_t bits = as_bits(((const float *)x)[at + c]) & 0x7FFFFFFF;
                bits = bits > 0x7F800000 ? 0 : bits;
                wide[c] = bits > wide[c] ? bits : wide[c];
            } else {
                uint16_t bits = ((const uint16_t *)x)[at + c] & 0x7FFF;
                bits = bits > infinity ? 0 : bits;
                narrow[c] = bits > narrow[c] ? bits : narrow[c];
            }
        }
    }
}

ALWAYS float widen(uint32_t wide, uint16_t narrow, const int dtype) {
    return dtype == FP32 ? as_float(wide) : load(&narrow, 0, dtype);
}

/* Scales of a row of tiles from their amaxes; the rules of scaling.py. */
static void tile_scales(const pass *restrict p, const float *restrict amax, int tiles, float *restrict scale,
                        float *restrict back, void *restrict stored) {
    if (p->rule == FROM_AMAX) {
        const float max = p->max, eps = p->eps, on_overflow = p->on_overflow;
        const uint32_t keep = p->power_of_two ? 0xFF800000 : 0xFFFFFFFF;
        float *restrict out = stored;
        for (int t = 0; t < tiles; t++) {
            float a = amax[t] < eps ? eps : amax[t], s = max / a;
            s = as_float(as_bits(s > FLT_MAX ? on_overflow : s) & keep);
            s = (a > 0) & (a <= FLT_MAX) ? s : 1.0f;
            scale[t] = s;
            out[t] = back[t] = 1.0f / s;
        }
    } else if (p->rule == E8M0) {
        const float max_inv = p->max_inv;
        uint8_t *restrict out = stored;
        for (int t = 0; t < tiles; t++) {
            uint32_t bits = as_bits(amax[t] * max_inv), exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
            uint32_t limit = exponent == 0 ? 0x400000 : 0; /* 2^-127 is a subnormal with this mantissa */
            exponent += mantissa > limit ? 1 : 0;
            exponent = exponent > 254 ? 254 : exponent;
            out[t] = (uint8_t)exponent;
            back[t] = as_float(exponent == 0 ? 0x400000 : exponent << 23);
            scale[t] = as_float(exponent == 254 ? 0x400000 : (254 - exponent) << 23);
        }
    } else {
        const grid e4m3 = grid_of(3, -6, 448.0f);
        const float whole = p->scale * (1.0f / 6.0f), inverse = 1.0f / p->scale;
        uint8_t *restrict out = stored;
        for (int t = 0; t < tiles; t++) {
            float product = amax[t] * whole, decode = nearest(product > FLT_MAX ? FLT_MAX : product, e4m3);
            float encode = 1.0f / (decode * inverse);
            scale[t] = encode > FLT_MAX ? FLT_MAX : encode;
            back[t] = decode;
            out[t] = (uint8_t)(decode < 0x1p-6f ? (int32_t)(decode * 512.0f) : (int32_t)(as_bits(decode) >> 20) - 960);
        }
    }
}

typedef struct { float amax, smallest, largest; } found;

typedef void (*store)(const pass *, int64_t at, int n, const float *scale, const float *back);

ALWAYS void panel(const pass *p, int64_t row, int64_t column, found *f, const int dtype, const store store_one) {
    uint32_t wide[PANEL];
    uint16_t narrow[PANEL];
    float scale[PANEL], back[PANEL], amax[PANEL], tile_scale[PANEL], tile_back[PANEL];
    const int64_t width = PANEL / p->tile_columns * p->tile_columns;
    const int n = (int)(p->columns - column < width ? p->columns - column : width);
    const int rows = (int)(p->rows - row < p->tile_rows ? p->rows - row : p->tile_rows);
    const int size = (int)p->tile_columns, tiles = (n + size - 1) / size;
    const int64_t at = row * p->columns + column;
    if (p->rule != GIVEN || p->measure) {
        column_amax(p->x, at, p->columns, rows, n, wide, narrow, dtype);
        for (int t = 0; t < tiles; t++) {
            const int end = n < (t + 1) * size ? n : (t + 1) * size;
            uint32_t most = 0;
            uint16_t most16 = 0;
            if (dtype == FP32) for (int c = t * size; c < end; c++) most = wide[c] > most ? wide[c] : most;
            else for (int c = t * size; c < end; c++) most16 = narrow[c] > most16 ? narrow[c] : most16;
            amax[t] = widen(most, most16, dtype);
        }
        for (int t = 0; t < tiles; t++) f->amax = amax[t] > f->amax ? amax[t] : f->amax;
    }
    if (p->rule == GIVEN) {
        for (int c = 0; c < n; c++) { scale[c] = p->scale; back[c] = p->shift; }
    } else {
        const int64_t across = (p->columns + size - 1) / size, first = row / p->tile_rows * across + column / size;
        const size_t stored = p->rule == FROM_AMAX ? sizeof(float) : 1;
        tile_scales(p, amax, tiles, tile_scale, tile_back, (char *)p->scale_inv + (size_t)first * stored);
        for (int t = 0; t < tiles; t++) {
            const int end = n < (t + 1) * size ? n : (t + 1) * size;
            const float in = tile_scale[t], out = tile_back[t] * p->shift;
            for (int c = t * size; c < end; c++) { scale[c] = in; back[c] = out; }
            float low = amax[t] > 0 ? tile_back[t] : FLT_MAX, high = amax[t] > 0 ? tile_back[t] : 0;
            f->smallest = low < f->smallest ? low : f->smallest;
            f->largest = high > f->largest ? high : f->largest;
        }
    }
    for (int r = 0; r < rows; r++)
        store_one(p, at + r * p->columns, n, scale, back);
}

ALWAYS void sweep(pass *p, const int dtype, const store store_one) {
    const int64_t width = PANEL / p->tile_columns * p->tile_columns;
    const int64_t bands = (p->rows + p->tile_rows - 1) / p->tile_rows, panels = (p->columns + width - 1) / width;
    found all = {0, FLT_MAX, 0};
#pragma omp parallel num_threads(p->threads)
    {
        found mine = {0, FLT_MAX, 0};
#pragma omp for schedule(static)
        for (int64_t i = 0; i < bands * panels; i++)
            panel(p, i / panels * p->tile_rows, i % panels * width, &mine, dtype, store_one);
#pragma omp critical
        {
            all.amax = mine.amax > all.amax ? mine.amax : all.amax;
            all.smallest = mine.smallest < all.smallest ? mine.smallest : all.smallest;
            all.largest = mine.largest > all.largest ? mine.largest : all.largest;
        }
    }
    p->amax = all.amax;
    p->smallest = all.smallest;
    p->largest = all.largest;
}

/* The stores are functions of their own: inlined into the loops above, gcc 12 does not vectorise them. */
#define SWEEP(dtype, codes, stochastic) \
    static __attribute__((noinline)) void store_##dtype##_##codes##_##stochastic( \
        const pass *p, int64_t at, int n, const float *scale, const float *back) { \
        store_row(p, p->x, p->out, at, n, scale, back, dtype, codes, stochastic); \
    } \
    static __attribute__((noinline)) void sweep_##dtype##_##codes##_##stochastic(pass *p) { \
        sweep(p, dtype, store_##dtype##_##codes##_##stochastic); \
    }
#define SWEEPS(dtype) SWEEP(dtype, 0, 0) SWEEP(dtype, 0, 1) SWEEP(dtype, 1, 0) SWEEP(dtype, 1, 1)
SWEEPS(FP32) SWEEPS(BF16) SWEEPS(FP16)

void bridge_quantise(pass *p) {
#define ROW(d) {{sweep_##d##_0_0, sweep_##d##_0_1}, {sweep_##d##_1_0, sweep_##d##_1_1}}
    static void (*const table[3][2][2])(pass *) = {ROW(FP32), ROW(BF16), ROW(FP16)};
    table[p->dtype][p->codes != 0][p->stochastic != 0](p);
}

ALWAYS float span_amax(const void *x, int64_t start, int64_t count, const int dtype) {
    uint32_t wide[PANEL];
    uint16_t narrow[PANEL];
    uint32_t most = 0;
    uint16_t most16 = 0;
    const int rows = (int)(count / PANEL), rest = (int)(count % PANEL);
    for (int part = 0; part < 2; part++) {
        const int n = part ? rest : PANEL;
        if (n == 0 || (!part && rows == 0)) continue;
        column_amax(x, start + (part ? (int64_t)rows * PANEL : 0), PANEL, part ? 1 : rows, n, wide, narrow, dtype);
        for (int c = 0; c < n; c++) most = wide[c] > most ? wide[c] : most;
        for (int c = 0; c < n; c++) most16 = narrow[c] > most16 ? narrow[c] : most16;
    }
    return widen(most, most16, dtype);
}

float bridge_amax(const void *x, int64_t count, int32_t dtype, int32_t threads) {
    const int64_t chunk = 1 << 16, chunks = (count + chunk - 1) / chunk;
    float all = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(max : all)
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t start = i * chunk, size = count - start < chunk ? count - start : chunk;
        float most = dtype == FP32 ? span_amax(x, start, size, FP32)
                   : dtype == BF16 ? span_amax(x, start, size, BF16) : span_amax(x, start, size, FP16);
        all = most > all ? most : all;
    }
    return all;
}

#define LANES 32
ALWAYS void transform(const void *x, uint16_t *out, int64_t row, int64_t rows, int64_t columns, int64_t column, int n,
                      const int *signs, const int dtype) {
    float v[16][LANES];
    const int height = (int)(rows - row < 16 ? rows - row : 16);
    for (int r = 0; r < 16; r++) {
        const float sign = (float)signs[r];
        for (int c = 0; c < LANES; c++) v[r][c] = 0 * sign; /* padding: a zero with the sign's sign, as in torch */
        if (r < height) for (int c = 0; c < n; c++) v[r][c] = load(x, (row + r) * columns + column + c, dtype) * sign;
    }
    for (int distance = 1; distance < 16; distance *= 2)
        for (int r = 0; r < 16; r++) {
            if (r & distance) continue;
            for (int c = 0; c < LANES; c++) {
                float a = v[r][c], b = v[r + distance][c];
                v[r][c] = a + b;
                v[r + distance][c] = a - b;
            }
        }
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < n; c++) out[(row + r) * columns + column + c] = bf16(v[r][c] * 0.25f);
}

void bridge_hadamard(const void *x, void *out, int64_t rows, int64_t columns, const int32_t *signs, int32_t dtype,
                     int32_t threads) {
    const int64_t groups = (rows + 15) / 16, across = (columns + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < groups * across; i++) {
        const int64_t row = i / across * 16, column = i % across * LANES;
        const int n = (int)(columns - column < LANES ? columns - column : LANES);
        if (dtype == FP32) transform(x, out, row, rows, columns, column, n, signs, FP32);
        else if (dtype == BF16) transform(x, out, row, rows, columns, column, n, signs, BF16);
        else transform(x, out, row, rows, columns, column, n, signs, FP16);
    }
}
