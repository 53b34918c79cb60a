/* The quantisation pass of tiles.py and the largest magnitude, in one sweep over memory each, with or without the
 * Hadamard transform on the way: the transformed matrix is never written.
 *
 * tiles.py and grid.py define the results; this file gives the same bits. What that rests on:
 *   - every operation is one IEEE operation in FP32: no -ffast-math (it would also flush subnormals for the whole
 *     process) and no contraction into fused multiply-adds;
 *   - magnitudes are compared as integers, which orders them correctly and lets NaN be skipped;
 *   - random numbers depend on position and seed alone, so threads do not change them.
 *
 * A panel is one band of tile_rows rows, at most PANEL columns wide: read twice, the second time from cache. The usual
 * widths of a tile are constants of the compiler, so that the loops over a tile become vector instructions.
 *
 * The parts of this file, in order:
 *   - numbers: BF16 and its pairs, random numbers, rounding to the grid of a format;
 *   - rows: scale, round and store;
 *   - the largest magnitude of each tile, and the scale of each tile;
 *   - the Hadamard transform;
 *   - rounding of BF16 numbers in place, for scales that are powers of two;
 *   - `panel`, `sweep` over all panels, and the functions that Python calls: `bridge_quantise`, `bridge_amax`;
 *   - stored codes: `bridge_decode`, `bridge_lay_out`.
 */
#if defined(__AVX512BW__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512") /* GCC's default for these processors is half of it */
#endif
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define PANEL 1024
#define MIXED 256 /* the same where rows are mixed, so that the transformed rows of a panel stay in the nearest cache */
#define GROUP 16 /* rows that the Hadamard transform mixes */
#define TILE 16 /* columns that share a scale where tiles are this wide or wider */
#ifdef __AVX512BW__
#define LANES 16 /* FP32 numbers of a vector */
#else
#define LANES 8
#endif
#define PAIRED (2 * LANES) /* columns of a vector of pairs: a step of the loops over BF16 numbers */
#define ALWAYS static inline __attribute__((always_inline))

enum { FP32, BF16, FP16 };
enum { RULE_TENSOR, RULE_FP32, RULE_E8M0, RULE_NVFP4 }; /* `QuantSpec.scale_rule` */

typedef struct {
    const void *x;            /* rows x columns, contiguous */
    void *out;                /* uint8 codes, or BF16 operand values */
    void *scale_inv;          /* per tile: float, or uint8 under RULE_E8M0 and RULE_NVFP4; unused under RULE_TENSOR */
    int64_t rows, columns, tile_rows, tile_columns;
    const int32_t *signs;     /* of the Hadamard transform; NULL without one */
    int64_t x_rows;           /* rows of x; `rows` are those of the result, more with a transform's padding */
    uint64_t seed;
    int32_t dtype, rule, codes, stochastic, power_of_two, threads, measure;
    int32_t mantissa_bits, min_exponent, bias, bits, nan_code, nan_bits; /* without NaN: those of +max */
    float max, max_inv, eps, on_overflow, scale, range_multiplier;
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

/* Two BF16 numbers, side by side in memory. The upper half of the integer is the second number, with zeros below it; a
 * shift makes the first one of the lower half. So a loop over pairs has two FP32 numbers per lane of a vector, and
 * neither widens nor narrows, which takes shuffles across the vector. */
typedef uint32_t pair __attribute__((aligned(2), may_alias));
typedef uint16_t code_pair __attribute__((aligned(1), may_alias)); /* two codes, likewise */
#define SIGNS 0x80008000u /* of both */

ALWAYS float first_of(uint32_t both) { return as_float(both << 16); }
ALWAYS float second_of(uint32_t both) { return as_float(both & 0xFFFF0000); }
/* The pair of two FP32 numbers, whose lower halves are cut off. */
ALWAYS uint32_t pair_of(float first, float second) { return as_bits(first) >> 16 | (as_bits(second) & 0xFFFF0000); }

/* Round to nearest even; of a NaN some NaN, if its lower half is zero, as in all that comes from BF16. */
ALWAYS uint16_t bf16_of_number(float x) {
    uint32_t bits = as_bits(x);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

ALWAYS uint16_t bf16(float x) { return (as_bits(x) & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : bf16_of_number(x); }

ALWAYS uint32_t hash(uint32_t x) { /* lowbias32, as in grid.py */
    x ^= x >> 16; x *= 0x7FEB352Du; x ^= x >> 15; x *= 0x846CA68Bu; return x ^ (x >> 16);
}

#define KEY_FACTOR 0x7FEB352Du
/* The random number of a column. `x` is the key of the column times KEY_FACTOR, plus the second key of the row, see
 * `row_rule_of`. */
ALWAYS float unit(uint32_t x) {
    x ^= x >> 15; x *= 0x846CA68Bu;
    return (float)(int32_t)(x >> 16) * 0x1p-16f;
}

/* a * b + c where the product is exact: one rounding, and so the same bits, with a fused instruction as with two. */
#ifdef __FMA__
#define EXACT_PRODUCT_PLUS(a, b, c) __builtin_fmaf(a, b, c)
#else
#define EXACT_PRODUCT_PLUS(a, b, c) ((a) * (b) + (c))
#endif

typedef struct { uint32_t floor_bits, anchor; float max; } grid;

/* A magnitude on the grid: (x + 2^k) - 2^k with the step of x's binade, see grid.py. NaN becomes the maximum. */
ALWAYS float nearest(float magnitude, const grid g) {
    magnitude = magnitude < g.max ? magnitude : g.max;
    uint32_t exponent = as_bits(magnitude) & 0x7F800000;
    exponent = exponent < g.floor_bits ? g.floor_bits : exponent;
    float anchor = as_float(exponent + g.anchor);
    return (magnitude + anchor) - anchor;
}

ALWAYS float random_neighbour(float magnitude, const grid g, uint32_t mantissa_bits, float u) {
    magnitude = magnitude < g.max ? magnitude : g.max;
    uint32_t exponent = as_bits(magnitude) & 0x7F800000;
    exponent = exponent < g.floor_bits ? g.floor_bits : exponent;
    float step = as_float(exponent - (mantissa_bits << 23)), inverse = as_float(((254 + mantissa_bits) << 23) - exponent);
    return floorf(EXACT_PRODUCT_PLUS(magnitude, inverse, u)) * step;
}

ALWAYS grid grid_of(int32_t mantissa_bits, int32_t min_exponent, float max) {
    grid g = {(uint32_t)(127 + min_exponent) << 23, (uint32_t)(23 - mantissa_bits) << 23, max};
    return g;
}

typedef struct {
    const void *x; /* source of a row, which may be a block that was transformed */
    int64_t from, to; /* index of its first element there, and in the result */
    uint32_t row, column; /* in the whole matrix */
    int n, size; /* columns, and of how many in turn a scale is */
    const float *scale, *back; /* per tile, or per column where tiles are narrow */
    const float *paired_scale, *paired_back; /* PER_COLUMN: in the order of `pair_up`; PER_PAIR: per pair */
} line;

/* What holds for all of a row. */
typedef struct {
    grid g;
    uint32_t first, second, nan_bits, nan_code; /* the first two are keys of random numbers */
    int32_t mantissa_bits, sign_shift, rebias;
    float normal, steps;
} row_rule;

ALWAYS row_rule row_rule_of(const pass *p, const line *l) {
    const grid g = grid_of(p->mantissa_bits, p->min_exponent, p->max);
    const uint32_t row_key = hash(l->row ^ (uint32_t)p->seed), second = hash(row_key ^ (uint32_t)(p->seed >> 32));
    /* The hash of x = column ^ row_key begins with x ^ x >> 16. A panel begins at a multiple of PANEL or MIXED columns, so
     * that its c-th column changes the lower half alone: this ^ c is that first step. */
    const uint32_t mixed = l->column ^ row_key, first = mixed ^ mixed >> 16;
    const int m = p->mantissa_bits;
    const row_rule q = {
        g, first, second, (uint32_t)p->nan_bits, (uint32_t)p->nan_code, m, 32 - p->bits, (127 - p->bias) << m,
        as_float(g.floor_bits), as_float((uint32_t)(127 + m - p->min_exponent) << 23)};
    return q;
}

/* Scale, round, and store a code or an operand value. NaN becomes `nan_code`, of which `nan_bits` is the value.
 * An operand value is exact in BF16, so its lower half is cut off rather than rounded. */
ALWAYS void store_one(const row_rule *q, const line *l, int c, uint32_t key, float scale, float back,
                      uint8_t *restrict code, uint16_t *restrict value, const int dtype, const int codes,
                      const int stochastic) {
    const uint32_t m = (uint32_t)q->mantissa_bits;
    const float y = load(l->x, l->from + c, dtype) * scale, magnitude = fabsf(y);
    const float u = unit(key * KEY_FACTOR + q->second);
    const float r = stochastic ? random_neighbour(magnitude, q->g, m, u) : nearest(magnitude, q->g);
    const int is_nan = as_bits(magnitude) > 0x7F800000;
    const uint32_t sign = is_nan ? 0 : as_bits(y) & 0x80000000;
    if (codes) {
        const int32_t small = (int32_t)(r * q->steps), large = (int32_t)(as_bits(r) >> (23 - m)) - q->rebias;
        const uint32_t bits = (uint32_t)(r < q->normal ? small : large) | sign >> q->sign_shift;
        code[c] = (uint8_t)(is_nan ? q->nan_code : bits);
    } else {
        value[c] = (uint16_t)(as_bits(as_float((is_nan ? q->nan_bits : as_bits(r)) | sign) * back) >> 16);
    }
}

ALWAYS void store_row(const pass *p, const line *given, const int dtype, const int codes, const int stochastic,
                      const int is_wide) {
    const line copy = *given, *l = &copy; /* a byte that is stored could be one of `given`: no loop would become vectors */
    const row_rule q = row_rule_of(p, l);
    const float *restrict scale = l->scale, *restrict back = l->back;
    uint8_t *restrict code = (uint8_t *)p->out + l->to;
    uint16_t *restrict value = (uint16_t *)p->out + l->to;
    const int shift = is_wide ? __builtin_ctz((unsigned)l->size) : 0, whole = is_wide ? l->n / TILE * TILE : 0;
    for (int start = 0; start < whole; start += TILE) {
        const float s = scale[start >> shift], b = back[start >> shift];
        const uint32_t key = q.first ^ (uint32_t)start;
#pragma GCC ivdep
        for (int k = 0; k < TILE; k++)
            store_one(&q, l, start + k, key ^ (uint32_t)k, s, b, code, value, dtype, codes, stochastic);
    }
#pragma GCC ivdep
    for (int c = whole; c < l->n; c++)
        store_one(&q, l, c, q.first ^ (uint32_t)c, scale[c >> shift], back[c >> shift], code, value, dtype, codes,
                  stochastic);
}

/* The keys of PAIRED columns differ in their lowest bits alone. So the argument of `unit` is the sum of a number of the
 * step and a number of the place in the step, and a column costs an addition in place of a multiplication. This function
 * returns the numbers of the places, in the order of pairs. */
ALWAYS void keys_of_places(const row_rule *q, uint32_t *restrict place) {
    const uint32_t low = q->first & (PAIRED - 1);
    for (uint32_t k = 0; k < LANES; k++) {
        place[k] = (low ^ (2 * k)) * KEY_FACTOR + q->second;
        place[LANES + k] = (low ^ (2 * k + 1)) * KEY_FACTOR + q->second;
    }
}

/* The number of the step that begins at column `start` of a panel; see `keys_of_places`. */
ALWAYS uint32_t key_of_step(const row_rule *q, int start) {
    return ((q->first ^ (uint32_t)start) & ~(PAIRED - 1u)) * KEY_FACTOR;
}

/* The columns of a step that have the same scale: none, those of a pair, or all. So a step is a whole vector, and loads its
 * scales as vectors, however wide a tile is. */
enum { PER_COLUMN, PER_PAIR, PER_VECTOR };

ALWAYS int scales_of(int64_t size) { return size >= PAIRED ? PER_VECTOR : size >= TILE ? PER_PAIR : PER_COLUMN; }

/* The index of the first scale of the step at column `start`. */
ALWAYS int scale_at(const line *l, int start, const int scales) {
    if (scales == PER_VECTOR) return start >> __builtin_ctz((unsigned)l->size);
    return scales == PER_PAIR ? start / 2 : start;
}

/* The magnitude of a BF16 number, scaled and on the grid; NaN becomes the maximum. `key`: the argument of `unit`. */
ALWAYS float rounded_magnitude(const row_rule *q, float magnitude, uint32_t key, float scale, const int stochastic) {
    const float y = magnitude * scale;
    if (stochastic) return random_neighbour(y, q->g, (uint32_t)q->mantissa_bits, unit(key));
    return nearest(y, q->g);
}

/* `store_one` for the magnitude of a BF16 number and an operand value. `has_nan`: whether the format has a NaN. */
ALWAYS float operand_magnitude(const row_rule *q, float magnitude, uint32_t key, float scale, float back,
                               const int stochastic, const int has_nan) {
    float r = rounded_magnitude(q, magnitude, key, scale, stochastic);
    if (has_nan) r = as_bits(magnitude) > 0x7F800000 ? as_float(q->nan_bits) : r;
    return r * back;
}

/* `store_one` for the magnitude of a BF16 number and a code, without its sign. */
ALWAYS uint32_t code_of_magnitude(const row_rule *q, float magnitude, uint32_t key, float scale, const int stochastic,
                                  const int has_nan) {
    const float r = rounded_magnitude(q, magnitude, key, scale, stochastic);
    const int32_t small = (int32_t)(r * q->steps), large = (int32_t)(as_bits(r) >> (23 - q->mantissa_bits)) - q->rebias;
    const uint32_t code = (uint32_t)(r < q->normal ? small : large);
    if (has_nan) return as_bits(magnitude) > 0x7F800000 ? q->nan_code : code;
    return code;
}

/* `store_one` for the BF16 numbers of a step and operand values. `key` and `place` are the numbers of the step and of its
 * places, see `keys_of_places`. */
ALWAYS void operand_step(const row_rule *q, const pair *x, pair *value, uint32_t key, const uint32_t *place,
                         const float *scale, const float *back, const int stochastic, const int scales,
                         const int has_nan) {
#pragma GCC unroll 1 /* unrolled, the loop would not become vectors */
#pragma GCC ivdep
    for (int k = 0; k < LANES; k++) {
        const int first = scales == PER_VECTOR ? 0 : k, second = scales == PER_COLUMN ? LANES + k : first;
        const uint32_t magnitudes = x[k] & ~SIGNS;
        const uint32_t signs = x[k] & ~(magnitudes + 0x007F007F) & SIGNS; /* the sum reaches the sign's bit for NaN alone */
        const float a = operand_magnitude(q, first_of(magnitudes), key + place[k], scale[first], back[first],
                                          stochastic, has_nan);
        const float b = operand_magnitude(q, second_of(magnitudes), key + place[LANES + k], scale[second],
                                          back[second], stochastic, has_nan);
        value[k] = pair_of(a, b) | signs;
    }
}

/* `store_one` for the BF16 numbers of a step and their codes: two codes in the lowest bytes of each integer, as a loop
 * that also narrowed them would have vectors of half the width. */
ALWAYS void code_step(const row_rule *q, const pair *x, uint32_t *codes, uint32_t key, const uint32_t *place,
                      const float *scale, const int stochastic, const int scales, const int has_nan) {
#pragma GCC unroll 1 /* unrolled, the loop would not become vectors */
#pragma GCC ivdep
    for (int k = 0; k < LANES; k++) {
        const int first = scales == PER_VECTOR ? 0 : k, second = scales == PER_COLUMN ? LANES + k : first;
        const uint32_t magnitudes = x[k] & ~SIGNS;
        const uint32_t signs = x[k] & ~(magnitudes + 0x007F007F) & SIGNS; /* as in `operand_step` */
        const uint32_t a = code_of_magnitude(q, first_of(magnitudes), key + place[k], scale[first], stochastic,
                                             has_nan);
        const uint32_t b = code_of_magnitude(q, second_of(magnitudes), key + place[LANES + k], scale[second], stochastic,
                                             has_nan);
        const uint32_t first_sign = (signs << 16) >> q->sign_shift, second_sign = signs >> q->sign_shift;
        codes[k] = (a | first_sign) | (b | second_sign) << 8;
    }
}

/* `store_row` for BF16 numbers and codes. */
ALWAYS void code_row(const pass *p, const line *l, const int stochastic, const int scales, const int has_nan) {
    const row_rule q = row_rule_of(p, l);
    const int whole = l->n / PAIRED * PAIRED, shift = scales == PER_COLUMN ? 0 : __builtin_ctz((unsigned)l->size);
    const uint16_t *x = (const uint16_t *)l->x + l->from;
    const float *scale = scales == PER_VECTOR ? l->scale : l->paired_scale;
    uint32_t codes[PANEL / 2];
    uint8_t *code = (uint8_t *)p->out + l->to;
    code_pair *pairs = (code_pair *)code;
    uint32_t place[PAIRED];
    if (stochastic) keys_of_places(&q, place);
    for (int start = 0; start < whole; start += PAIRED)
        code_step(&q, (const pair *)(x + start), codes + start / 2, key_of_step(&q, start), place,
                  scale + scale_at(l, start, scales), stochastic, scales, has_nan);
    for (int k = 0; k < whole / 2; k++) pairs[k] = (code_pair)codes[k];
    for (int c = whole; c < l->n; c++)
        store_one(&q, l, c, q.first ^ (uint32_t)c, l->scale[c >> shift], l->back[c >> shift], code, NULL, BF16, 1,
                  stochastic);
}

/* `store_row` for BF16 numbers and operand values. */
ALWAYS void operand_row(const pass *p, const line *l, const int stochastic, const int scales, const int has_nan) {
    const row_rule q = row_rule_of(p, l);
    const int whole = l->n / PAIRED * PAIRED, shift = scales == PER_COLUMN ? 0 : __builtin_ctz((unsigned)l->size);
    const uint16_t *x = (const uint16_t *)l->x + l->from;
    const float *scale = scales == PER_VECTOR ? l->scale : l->paired_scale;
    const float *back = scales == PER_VECTOR ? l->back : l->paired_back;
    uint16_t *value = (uint16_t *)p->out + l->to;
    uint32_t place[PAIRED];
    if (stochastic) keys_of_places(&q, place);
    for (int start = 0; start < whole; start += PAIRED)
        operand_step(&q, (const pair *)(x + start), (pair *)(value + start), key_of_step(&q, start), place,
                     scale + scale_at(l, start, scales), back + scale_at(l, start, scales), stochastic, scales, has_nan);
    for (int c = whole; c < l->n; c++)
        store_one(&q, l, c, q.first ^ (uint32_t)c, l->scale[c >> shift], l->back[c >> shift], NULL, value, BF16, 0,
                  stochastic);
}

/* The numbers of PAIRED columns in the order of pairs: those of the first halves, and then those of the second ones. */
ALWAYS void pair_up(const float *restrict from, float *restrict to, int n) {
    for (int start = 0; start < n / PAIRED * PAIRED; start += PAIRED)
        for (int k = 0; k < LANES; k++) {
            to[start + k] = from[start + 2 * k];
            to[start + LANES + k] = from[start + 2 * k + 1];
        }
}

/* Magnitudes are compared as integers: their bits plus what lifts infinity to the largest integer, so that NaN becomes
 * negative and is never the larger one. Zero becomes the lift itself. */
ALWAYS int32_t lift(const int dtype) { return dtype == FP32 ? 0x7FFFFF : dtype == BF16 ? 0x7F : 0x3FF; }

/* Largest magnitude per column, as such integers. */
ALWAYS void column_amax(const void *x, int64_t at, int64_t stride, int rows, int n, int32_t *wide, int16_t *narrow,
                        const int dtype) {
    for (int r = 0; r < rows; r++, at += stride) {
        for (int c = 0; c < n; c++) {
            if (dtype == FP32) {
                const int32_t one = (int32_t)((as_bits(((const float *)x)[at + c]) & 0x7FFFFFFF) + (uint32_t)lift(dtype));
                wide[c] = one > wide[c] ? one : wide[c];
            } else {
                const int16_t one = (int16_t)((((const uint16_t *)x)[at + c] & 0x7FFF) + lift(dtype));
                narrow[c] = one > narrow[c] ? one : narrow[c];
            }
        }
    }
}

/* The larger one of each pair of neighbours; from n numbers to n / 2. */
ALWAYS void halve_wide(const int32_t *restrict in, int32_t *restrict out, int n) {
    for (int i = 0; i < n / 2; i++) out[i] = in[2 * i] > in[2 * i + 1] ? in[2 * i] : in[2 * i + 1];
}

ALWAYS void halve_narrow(const int16_t *restrict in, int16_t *restrict out, int n) {
    for (int i = 0; i < n / 2; i++) out[i] = in[2 * i] > in[2 * i + 1] ? in[2 * i] : in[2 * i + 1];
}

#ifdef __AVX512BW__
#define COUNT 32
#elif defined(__AVX2__)
#define COUNT 16
#else
#define COUNT 8
#endif
/* COUNT magnitudes in a register; every other number of two of them, from the o-th on. */
typedef int16_t shorts __attribute__((vector_size(2 * COUNT)));
#define OTHER_8(o) (o), (o) + 2, (o) + 4, (o) + 6, (o) + 8, (o) + 10, (o) + 12, (o) + 14
#define OTHER_16(o) OTHER_8(o), OTHER_8((o) + 16)
#define OTHER_32(o) OTHER_16(o), OTHER_16((o) + 32)
#define OTHER_OF(n, o) OTHER_##n(o)
#define OTHER(n, o) OTHER_OF(n, o)
/* Bytes of two registers in turn, from the o-th on. */
#define IN_TURN(o) (o), (o) + 16, (o) + 1, (o) + 17, (o) + 2, (o) + 18, (o) + 3, (o) + 19, \
    (o) + 4, (o) + 20, (o) + 5, (o) + 21, (o) + 6, (o) + 22, (o) + 7, (o) + 23
#if defined(__clang__) || __GNUC__ >= 12
#define EVERY_OTHER(a, b, o) __builtin_shufflevector(a, b, OTHER(COUNT, o))
#define ZIP(a, b, o) __builtin_shufflevector(a, b, IN_TURN(o))
#else
#define EVERY_OTHER(a, b, o) __builtin_shuffle(a, b, (shorts){OTHER(COUNT, o)})
#define ZIP(a, b, o) __builtin_shuffle(a, b, (bytes){IN_TURN(o)})
#endif

/* The larger one of each pair of neighbours in the numbers of a and b. */
ALWAYS shorts larger(shorts a, shorts b) {
    const shorts even = EVERY_OTHER(a, b, 0), odd = EVERY_OTHER(a, b, 1), more = even > odd;
    return (even & more) | (odd & ~more);
}

/* Largest magnitude of each 16 numbers of a row, lifted; n is a multiple of 16 * COUNT. */
ALWAYS void row_amax(const uint16_t *x, int n, int16_t *restrict narrow, const int dtype) {
    for (int i = 0; i < n; i += 16 * COUNT) {
        shorts v[16];
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) {
            memcpy(&v[k], x + i + k * COUNT, sizeof v[k]);
            v[k] = (v[k] & 0x7FFF) + (int16_t)lift(dtype);
        }
#pragma GCC unroll 4
        for (int pairs = 8; pairs > 0; pairs /= 2)
#pragma GCC unroll 8
            for (int k = 0; k < pairs; k++) v[k] = larger(v[2 * k], v[2 * k + 1]);
        memcpy(narrow + i / 16, &v[0], sizeof v[0]);
    }
}

#define AHEAD 2048 /* numbers; the processor itself fetches no further than the page */
/* Largest magnitude of n numbers of 16 bits in a row; n is a multiple of 4 * COUNT. */
static __attribute__((noinline)) float flat_amax(const uint16_t *x, int64_t n, int dtype) {
    shorts most[4], v;
    int16_t all = (int16_t)lift(dtype);
    for (int k = 0; k < 4; k++) most[k] = (shorts){0} + all;
    for (int64_t i = 0; i < n; i += 4 * COUNT) {
        for (int k = 0; k < 4 * COUNT; k += 32) __builtin_prefetch(x + i + AHEAD + k);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            memcpy(&v, x + i + k * COUNT, sizeof v);
            v = (v & 0x7FFF) + (int16_t)lift(dtype);
            const shorts more = v > most[k];
            most[k] = (v & more) | (most[k] & ~more);
        }
    }
    for (int k = 0; k < 4 * COUNT; k++) all = most[k / COUNT][k % COUNT] > all ? most[k / COUNT][k % COUNT] : all;
    const uint16_t bits = (uint16_t)(all - lift(dtype));
    return dtype == BF16 ? load(&bits, 0, BF16) : load(&bits, 0, FP16);
}

/* Largest magnitude of each tile of a panel; `size`, the width of a tile, is a power of two. */
ALWAYS void tile_amax(const void *x, int64_t at, int64_t stride, int rows, int n, int size, float *restrict amax,
                      const int dtype) {
    int32_t wide[2][PANEL];
    int16_t narrow[2][PANEL];
    int left = (n + size - 1) / size * size, now = 0;
    if (dtype != FP32 && rows == 1 && size >= 16 && left == n && n % (16 * COUNT) == 0) {
        row_amax((const uint16_t *)x + at, n, narrow[0], dtype);
        size /= 16;
        left /= 16;
    } else {
        for (int c = 0; c < left; c++) {
            if (dtype == FP32) wide[0][c] = lift(dtype);
            else narrow[0][c] = (int16_t)lift(dtype);
        }
        column_amax(x, at, stride, rows, n, wide[0], narrow[0], dtype);
    }
    for (; size > 1; size /= 2, left /= 2, now = !now) {
        if (dtype == FP32) halve_wide(wide[now], wide[!now], left);
        else halve_narrow(narrow[now], narrow[!now], left);
    }
    for (int t = 0; t < left; t++) {
        const int16_t most = narrow[now][t] < lift(dtype) ? (int16_t)lift(dtype) : narrow[now][t]; /* of NaN alone: 0 */
        const uint16_t bits = (uint16_t)(most - lift(dtype));
        amax[t] = dtype == FP32 ? as_float((uint32_t)(wide[now][t] - lift(dtype))) : load(&bits, 0, dtype);
    }
}

/* Scales of a row of tiles from their amaxes; the rules of scaling.py. */
static void tile_scales(const pass *restrict p, const float *restrict amax, int tiles, float *restrict scale,
                        float *restrict back, void *restrict stored) {
    if (p->rule == RULE_FP32) {
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
    } else if (p->rule == RULE_E8M0) {
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
            const float decode = nearest(amax[t] * whole, e4m3); /* infinity becomes the maximum there */
            const uint32_t encode = as_bits(1.0f / (decode * inverse)), most = as_bits(FLT_MAX);
            scale[t] = as_float(encode > most ? most : encode); /* infinity, of zero; as integers for vectors */
            back[t] = decode;
            out[t] = (uint8_t)(decode < 0x1p-6f ? (int32_t)(decode * 512.0f) : (int32_t)(as_bits(decode) >> 20) - 960);
        }
    }
}

/* Magnitudes as bits: integers have an order that lets a loop over them be vectorised. */
typedef struct { uint32_t amax, smallest, largest; } found;

typedef void (*store)(const pass *, const line *);
typedef void (*measure)(const void *, int64_t at, int64_t stride, int rows, int n, int size, float *amax);
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t words __attribute__((vector_size(4 * LANES)));
typedef uint32_t unsigned_words __attribute__((vector_size(4 * LANES)));

/* From a panel of n columns to the one that is worked on next. */
ALWAYS int64_t to_next(const pass *p, int64_t column, int n, int64_t rows) {
    return column + n < p->columns ? n : rows * p->columns - column;
}

/* Begin to read n elements of x that are needed soon. */
ALWAYS void fetch(const pass *p, int64_t at, int n) {
    const int64_t size = p->dtype == FP32 ? 4 : 2;
    if (at + n > p->x_rows * p->columns) return;
    for (int64_t byte = 0; byte < n * size; byte += 64) __builtin_prefetch((const char *)p->x + at * size + byte);
}

/* Columns whose rows are brought together before they are mixed: at usual widths the rows of x lie a whole number of
 * pages apart, of which the nearest cache keeps only half a group. BF16 numbers stay as pairs, which take half the
 * memory. The columns of other numbers are in the order of pairs. */
#define STRIP 64
typedef union { float x[GROUP][STRIP]; uint32_t pairs[GROUP][STRIP / 2]; } strip;

/* Read n BF16 numbers of a row, with zeros up to a multiple of PAIRED. `flip` is SIGNS where their signs change: a
 * multiplication by -1 without widening. */
ALWAYS void read_pairs(const uint16_t *x, int n, uint32_t flip, uint32_t *restrict to) {
    const int whole = n / PAIRED * PAIRED;
    for (int k = 0; k < whole / 2; k++) to[k] = ((const pair *)x)[k] ^ flip;
    for (int c = whole; c < n || c % PAIRED; c += 2) {
        const uint32_t first = c < n ? x[c] : 0, second = c + 1 < n ? x[c + 1] : 0;
        to[c / 2] = (first | second << 16) ^ flip; /* a zero with the sign's sign, as in torch */
    }
}

/* `read_pairs` for other numbers. */
ALWAYS void read_numbers(const void *x, int64_t at, int n, float sign, float *restrict to, const int dtype) {
    for (int c = 0; c < n || c % PAIRED; c++) {
        const float one = c < n ? load(x, at + c, dtype) : 0;
        to[c / PAIRED * PAIRED + c % 2 * LANES + c % PAIRED / 2] = one * sign;
    }
}

/* Read n columns of one group of rows, with their signs. Rows after the last one are zeros. */
ALWAYS void read_strip(const pass *p, int64_t row, int64_t column, int n, strip *s, const int dtype) {
    static const float nothing[STRIP];
    for (int r = 0; r < GROUP; r++) {
        const int is_there = row + r < p->x_rows, sign = p->signs[r];
        const void *x = is_there ? p->x : nothing;
        const int64_t at = is_there ? (row + r) * p->columns + column : 0;
        if (dtype == BF16) read_pairs((const uint16_t *)x + at, n, sign < 0 ? SIGNS : 0, s->pairs[r]);
        else read_numbers(x, at, n, (float)sign, s->x[r], dtype);
    }
}

/* Begin to read what follows the strip at `start` in a panel of n columns. */
ALWAYS void fetch_next(const pass *p, int64_t row, int64_t column, int start, int n) {
    const int64_t next = start + STRIP < n ? start + STRIP : to_next(p, column, n, GROUP);
    for (int r = 0; r < GROUP; r++) fetch(p, (row + r) * p->columns + column + next, n - start < STRIP ? n - start : STRIP);
}

/* Three of the four rounds of butterflies, in registers, of LANES pairs of columns: of the second columns of the pairs,
 * or of the first ones. The last round adds and subtracts v[r] and v[r + GROUP / 2]. */
ALWAYS void mix(const strip *s, int column, int second, lanes v[GROUP], const int dtype) {
#pragma GCC unroll 2
    for (int half = 0; half < GROUP; half += GROUP / 2) {
        lanes w[GROUP / 2];
#pragma GCC unroll 8
        for (int r = 0; r < GROUP / 2; r++) {
            unsigned_words both;
            if (dtype == BF16) {
                memcpy(&both, &s->pairs[half + r][column / 2], sizeof both);
                if (second) w[r] = (lanes)(both & 0xFFFF0000);
                else w[r] = (lanes)(both << 16);
            } else memcpy(&w[r], &s->x[half + r][column + second * LANES], sizeof w[r]);
        }
#pragma GCC unroll 3
        for (int distance = 1; distance < GROUP / 2; distance *= 2)
#pragma GCC unroll 8
            for (int r = 0; r < GROUP / 2; r++) {
                if (r & distance) continue;
                const lanes a = w[r], b = w[r + distance];
                w[r] = a + b;
                w[r + distance] = a - b;
            }
#pragma GCC unroll 8
        for (int r = 0; r < GROUP / 2; r++) v[half + r] = w[r];
    }
}

ALWAYS lanes magnitudes_of(lanes x) { return (lanes)((words)x & 0x7FFFFFFF); }

/* Largest magnitude of each column after the last round, which is that of a + b or of a - b and so |a| + |b|. It is 4 times
 * the transform's, and not rounded: that does not change which one is the largest. A comparison with NaN is false. */
ALWAYS lanes mixed_amax(const lanes v[GROUP], lanes most) {
#pragma GCC unroll 8
    for (int r = 0; r < GROUP / 2; r++) {
        const lanes sum = magnitudes_of(v[r]) + magnitudes_of(v[r + GROUP / 2]);
        const words more = sum > most;
        most = (lanes)(((words)sum & more) | ((words)most & ~more));
    }
    return most;
}

/* Bits of x / 4 rounded to BF16, in the upper halves; the lower ones are to be cut off. */
ALWAYS unsigned_words quarter(lanes x, const int dtype) {
    const lanes y = x * 0.25f;
    const unsigned_words bits = (unsigned_words)y, rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    if (dtype == BF16) return rounded; /* see `bf16_of_number` */
    const unsigned_words is_nan = (unsigned_words)(y != y);
    return (rounded & ~is_nan) | (is_nan & 0x7FC00000);
}

/* The transform of n <= MIXED columns of one group of rows; `out` has room for whole PAIRED columns. */
ALWAYS void transform(const pass *p, int64_t row, int64_t column, int n, uint16_t *restrict out, const int dtype) {
    for (int start = 0; start < n; start += STRIP) {
        strip s;
        const int width = n - start < STRIP ? n - start : STRIP;
        fetch_next(p, row, column, start, n);
        read_strip(p, row, column + start, width, &s, dtype);
        for (int c = 0; c < width; c += PAIRED) {
            lanes v[GROUP];
            unsigned_words firsts[GROUP];
#pragma GCC unroll 2
            for (int second = 0; second < 2; second++) { /* halves of the pairs */
                mix(&s, c, second, v, dtype);
#pragma GCC unroll 16
                for (int r = 0; r < GROUP; r++) {
                    const lanes a = v[r % (GROUP / 2)], b = v[r % (GROUP / 2) + GROUP / 2];
                    const unsigned_words bits = quarter(r < GROUP / 2 ? a + b : a - b, dtype);
                    if (second) {
                        const unsigned_words both = firsts[r] | (bits & 0xFFFF0000);
                        memcpy(out + r * MIXED + start + c, &both, sizeof both);
                    } else firsts[r] = bits >> 16;
                }
            }
        }
    }
}

/* The sum of the magnitudes of each column of a whole strip, in the order of pairs. The sums stay in registers. */
ALWAYS void column_sums(const pass *p, int64_t row, int64_t column, float *restrict sums, const int dtype) {
    lanes sum[STRIP / LANES];
    for (int k = 0; k < STRIP / LANES; k++) sum[k] = (lanes){0};
    for (int r = 0; r < GROUP && row + r < p->x_rows; r++) {
        const int64_t at = (row + r) * p->columns + column;
#pragma GCC unroll 4
        for (int k = 0; k < STRIP / PAIRED; k++) {
            lanes first = {0}, second = {0};
            if (dtype == BF16) {
                unsigned_words both;
                memcpy(&both, (const uint16_t *)p->x + at + k * PAIRED, sizeof both);
                first = (lanes)((both & ~SIGNS) << 16);
                second = (lanes)(both & (~SIGNS & 0xFFFF0000));
            } else {
                for (int c = 0; c < LANES; c++) {
                    first[c] = fabsf(load(p->x, at + k * PAIRED + 2 * c, dtype));
                    second[c] = fabsf(load(p->x, at + k * PAIRED + 2 * c + 1, dtype));
                }
            }
            sum[2 * k] += first;
            sum[2 * k + 1] += second;
        }
    }
    memcpy(sums, sum, sizeof sum);
}

/* Whether no column of a tile can exceed `most` after the last round. None exceeds the sum of its magnitudes, up to the
 * roundings of 19 additions, which the margin covers. Most tiles of usual tensors are below, and need no transform. A
 * tile with NaN or infinity never is. */
ALWAYS int is_below(const float *sums, float most) {
    int above = 0;
    for (int c = 0; c < PAIRED; c++) above |= !(sums[c] * (1 + 0x1p-18f) <= most);
    return !above;
}

/* The largest `mixed_amax` of n <= PANEL columns of one group of rows, or `most` where that is larger. */
ALWAYS float transform_amax(const pass *p, int64_t row, int64_t column, int n, float most, const int dtype) {
    for (int start = 0; start < n; start += STRIP) {
        strip s;
        float sums[STRIP];
        const int width = n - start < STRIP ? n - start : STRIP, is_whole = width == STRIP;
        int is_read = 0;
        fetch_next(p, row, column, start, n);
        if (is_whole) column_sums(p, row, column + start, sums, dtype);
        for (int c = 0; c < width; c += PAIRED) {
            lanes v[GROUP], found = {0};
            if (is_whole && is_below(sums + c, most)) continue;
            if (!is_read) read_strip(p, row, column + start, width, &s, dtype);
            is_read = 1;
#pragma GCC unroll 2
            for (int second = 0; second < 2; second++) {
                mix(&s, c, second, v, dtype);
                found = mixed_amax(v, found);
            }
            for (int k = 0; k < LANES; k++) most = found[k] > most ? found[k] : most;
        }
    }
    return most;
}

static __attribute__((noinline)) void transformed(const pass *p, int64_t row, int64_t column, int n, uint16_t *out) {
    if (p->dtype == FP32) transform(p, row, column, n, out, FP32);
    else if (p->dtype == BF16) transform(p, row, column, n, out, BF16);
    else transform(p, row, column, n, out, FP16);
}

static __attribute__((noinline)) float transformed_amax(const pass *p, int64_t row, int64_t column, int n, float most) {
    if (p->dtype == FP32) return transform_amax(p, row, column, n, most, FP32);
    if (p->dtype == BF16) return transform_amax(p, row, column, n, most, BF16);
    return transform_amax(p, row, column, n, most, FP16);
}

/* `to` gets each of `from` as often as a tile is wide. */
ALWAYS void spread_by(const float *restrict from, float *restrict to, int n, const int size) {
    const int tiles = n / size;
    for (int t = 0; t < tiles; t++)
        for (int c = 0; c < size; c++) to[t * size + c] = from[t];
    for (int c = tiles * size; c < n; c++) to[c] = from[tiles];
}

static void spread(const float *from, float *to, int n, int size) {
    if (size == 1) spread_by(from, to, n, 1);
    else if (size == 8) spread_by(from, to, n, 8);
    else if (size == 16) spread_by(from, to, n, 16);
    else if (size == 32) spread_by(from, to, n, 32);
    else spread_by(from, to, n, size);
}

/* A power of two as scale moves a number's exponent alone. So BF16 numbers become operand values of a format by rounding
 * their own mantissa: integers of half the width, and no scale. That holds for zero and from the smallest normal number
 * of the scaled format on; other numbers need `store_row`. No number exceeds the maximum, unless Inf decided the scale. */
ALWAYS int rounds_in_place(const pass *p) {
    return !p->signs && p->dtype == BF16 && !p->codes && !p->stochastic && p->range_multiplier == 1.0f
        && (p->rule == RULE_E8M0 || (p->rule == RULE_FP32 && p->power_of_two));
}

/* The smallest normal number of the scaled format for each column, in BF16; BF16's own where that is larger. */
ALWAYS void normals_by(const pass *p, const float *restrict amax, const float *restrict back, int16_t *restrict normal,
                       int n, const int size) {
    for (int t = 0; t * size < n; t++) {
        int32_t exponent = (int32_t)(as_bits(back[t]) >> 23) + p->min_exponent;
        exponent = exponent < 1 ? 1 : exponent;
        const int16_t one = (int16_t)((amax[t] > FLT_MAX ? 0xFF : exponent) << 7);
        const int end = (t + 1) * size < n ? (t + 1) * size : n;
        for (int c = t * size; c < end; c++) normal[c] = one;
    }
}

static void normals(const pass *p, const float *amax, const float *back, int16_t *normal, int n, int size) {
    if (size == 1) normals_by(p, amax, back, normal, n, 1);
    else normals_by(p, amax, back, normal, n, size);
}

/* Round a row in place of `store_row`; return whether it holds a number for which that does not hold. */
static __attribute__((noinline)) int round_row(const pass *p, const uint16_t *restrict x, uint16_t *restrict out, int n,
                                               const int16_t *restrict normal) {
    const int16_t step = (int16_t)(1 << (7 - p->mantissa_bits)), half = step / 2 - 1, kept = (int16_t)-step;
    int16_t others = 0;
    for (int c = 0; c < n; c++) {
        const int16_t magnitude = x[c] & 0x7FFF;
        const int16_t rounded = (int16_t)(magnitude + half + ((magnitude & step) != 0)) & kept;
        out[c] = (uint16_t)(rounded | (x[c] & 0x8000));
        others |= (int16_t)-(((magnitude > 0) & (magnitude < normal[c])) | (magnitude >= 0x7F80));
    }
    return others != 0;
}

/* Columns of a panel: whole tiles. */
ALWAYS int panel_width(const pass *p) {
    return p->signs ? MIXED : (int)(PANEL / p->tile_columns * p->tile_columns);
}

static void panel(const pass *p, int64_t row, int64_t column, found *f, measure tile_amax, store store_one_row) {
    uint16_t block[GROUP * MIXED];
    int16_t normal[PANEL];
    float scale[PANEL], back[PANEL], amax[PANEL], tile_scale[PANEL], tile_back[PANEL];
    float paired_scale[PANEL], paired_back[PANEL];
    const int size = (int)p->tile_columns, width = panel_width(p), is_narrow = size < TILE;
    const int n = (int)(p->columns - column < width ? p->columns - column : width);
    const int rows = (int)(p->rows - row < p->tile_rows ? p->rows - row : p->tile_rows);
    const int tiles = (n + size - 1) / size;
    const int64_t next = to_next(p, column, n, p->tile_rows);
    const int64_t to = row * p->columns + column, stride = p->signs ? MIXED : p->columns;
    const int in_place = rounds_in_place(p);
    line l = {p->x, to, to, (uint32_t)row, (uint32_t)column, n, size, tile_scale, tile_back, paired_scale, paired_back};
    if (p->signs) {
        transformed(p, row, column, n, block);
        l.x = block;
        l.from = 0;
    }
    if (p->rule != RULE_TENSOR || p->measure) {
        tile_amax(l.x, l.from, stride, rows, n, size, amax);
        for (int t = 0; t < tiles; t++) f->amax = as_bits(amax[t]) > f->amax ? as_bits(amax[t]) : f->amax;
    }
    if (p->rule == RULE_TENSOR) {
        for (int t = 0; t < tiles; t++) { tile_scale[t] = p->scale; tile_back[t] = 1; }
    } else {
        const int64_t across = (p->columns + size - 1) / size, first = row / p->tile_rows * across + column / size;
        const size_t stored = p->rule == RULE_FP32 ? sizeof(float) : 1;
        tile_scales(p, amax, tiles, tile_scale, tile_back, (char *)p->scale_inv + (size_t)first * stored);
        if (in_place) normals(p, amax, tile_back, normal, n, size);
        for (int t = 0; p->rule != RULE_NVFP4 && t < tiles; t++) {
            const uint32_t low = amax[t] > 0 ? as_bits(tile_back[t]) : UINT32_MAX;
            const uint32_t high = amax[t] > 0 ? as_bits(tile_back[t]) : 0;
            f->smallest = low < f->smallest ? low : f->smallest;
            f->largest = high > f->largest ? high : f->largest;
        }
    }
    for (int t = 0; t < tiles; t++) tile_back[t] *= p->range_multiplier;
    if (is_narrow && size > 1) {
        spread(tile_scale, scale, n, size);
        spread(tile_back, back, n, size);
        l.scale = scale;
        l.back = back;
    }
    if (scales_of(size) == PER_PAIR) {
        spread(tile_scale, paired_scale, n / 2, TILE / 2);
        spread(tile_back, paired_back, n / 2, TILE / 2);
    }
    if (is_narrow) {
        pair_up(l.scale, paired_scale, n);
        pair_up(l.back, paired_back, n);
    }
    for (int r = 0; r < rows; r++, l.row++, l.from += stride, l.to += p->columns) {
        if (!p->signs) fetch(p, l.to + next, n);
        if (in_place && !round_row(p, (const uint16_t *)l.x + l.from, (uint16_t *)p->out + l.to, n, normal)) continue;
        store_one_row(p, &l);
    }
}

static void sweep(pass *p, measure tile_amax, store store_one) {
    const int64_t width = panel_width(p);
    const int64_t bands = (p->rows + p->tile_rows - 1) / p->tile_rows, panels = (p->columns + width - 1) / width;
    found all = {0, UINT32_MAX, 0};
#pragma omp parallel num_threads(p->threads)
    {
        found mine = {0, UINT32_MAX, 0};
#pragma omp for schedule(static)
        for (int64_t i = 0; i < bands * panels; i++)
            panel(p, i / panels * p->tile_rows, i % panels * width, &mine, tile_amax, store_one);
#pragma omp critical
        {
            all.amax = mine.amax > all.amax ? mine.amax : all.amax;
            all.smallest = mine.smallest < all.smallest ? mine.smallest : all.smallest;
            all.largest = mine.largest > all.largest ? mine.largest : all.largest;
        }
    }
    p->amax = as_float(all.amax);
    p->smallest = as_float(all.smallest);
    p->largest = as_float(all.largest);
}

/* These are functions of their own: inlined into the loops above, gcc 12 does not vectorise them. */
#define MEASURE(dtype) \
    static __attribute__((noinline)) void amax_##dtype( \
        const void *x, int64_t at, int64_t stride, int rows, int n, int size, float *amax) { \
        tile_amax(x, at, stride, rows, n, size, amax, dtype); \
    }
MEASURE(FP32) MEASURE(BF16) MEASURE(FP16)
static const measure measures[3] = {amax_FP32, amax_BF16, amax_FP16};

#define STORE(dtype, codes, stochastic, is_wide) \
    static __attribute__((noinline)) void store_##dtype##_##codes##_##stochastic##_##is_wide(const pass *p, const line *l) { \
        store_row(p, l, dtype, codes, stochastic, is_wide); \
    }
#define STORES(dtype, codes) \
    STORE(dtype, codes, 0, 0) STORE(dtype, codes, 0, 1) STORE(dtype, codes, 1, 0) STORE(dtype, codes, 1, 1)
STORES(FP32, 0) STORES(FP32, 1) STORES(FP16, 0) STORES(FP16, 1)

#define BF16_ROW(kind, stochastic, scales, has_nan) \
    static __attribute__((noinline)) void kind##_##stochastic##_##scales##_##has_nan(const pass *p, const line *l) { \
        kind##_row(p, l, stochastic, scales, has_nan); \
    }
#define BF16_ROWS(kind, stochastic) \
    BF16_ROW(kind, stochastic, PER_COLUMN, 0) BF16_ROW(kind, stochastic, PER_COLUMN, 1) \
    BF16_ROW(kind, stochastic, PER_PAIR, 0) BF16_ROW(kind, stochastic, PER_PAIR, 1) \
    BF16_ROW(kind, stochastic, PER_VECTOR, 0) BF16_ROW(kind, stochastic, PER_VECTOR, 1)
BF16_ROWS(operand, 0) BF16_ROWS(operand, 1) BF16_ROWS(code, 0) BF16_ROWS(code, 1)

/* The function that stores a row of a dtype. */
static store store_for(const pass *p, int dtype) {
#define PAIRS(d, codes) \
    {{store_##d##_##codes##_0_0, store_##d##_##codes##_0_1}, {store_##d##_##codes##_1_0, store_##d##_##codes##_1_1}}
#define SCALES(kind, stochastic, scales) {kind##_##stochastic##_##scales##_0, kind##_##stochastic##_##scales##_1}
#define WIDTHS(kind, stochastic) \
    {SCALES(kind, stochastic, PER_COLUMN), SCALES(kind, stochastic, PER_PAIR), SCALES(kind, stochastic, PER_VECTOR)}
    static const store codes[3][2][2] = {PAIRS(FP32, 1), {{NULL}}, PAIRS(FP16, 1)};
    static const store values[3][2][2] = {PAIRS(FP32, 0), {{NULL}}, PAIRS(FP16, 0)};
    static const store bf16_codes[2][3][2] = {WIDTHS(code, 0), WIDTHS(code, 1)};
    static const store bf16_values[2][3][2] = {WIDTHS(operand, 0), WIDTHS(operand, 1)};
    const int stochastic = p->stochastic != 0, is_wide = p->tile_columns >= TILE;
    const int has_nan = p->nan_bits != (int32_t)as_bits(p->max);
    const int scales = scales_of(p->tile_columns);
    if (dtype == BF16) return (p->codes ? bf16_codes : bf16_values)[stochastic][scales][has_nan];
    return (p->codes ? codes : values)[dtype][stochastic][is_wide];
}

void bridge_quantise(pass *p) {
    const int dtype = p->signs ? BF16 : p->dtype; /* the transform's result is BF16 */
    sweep(p, measures[dtype], store_for(p, dtype));
}

/* Largest magnitude of the whole matrix; of the pass it reads x, x_rows, columns, signs, dtype and threads. */
float bridge_amax(const pass *p) {
    const int64_t count = p->x_rows * p->columns, lines = 128, chunk = lines * PANEL;
    const int64_t across = (p->columns + PANEL - 1) / PANEL, groups = (p->x_rows + GROUP - 1) / GROUP;
    const int64_t parts = p->signs ? groups * across : (count + chunk - 1) / chunk;
    const measure tile_amax = measures[p->dtype];
    float all = 0;
#pragma omp parallel for num_threads(p->threads) schedule(static) reduction(max : all)
    for (int64_t i = 0; i < parts; i++) {
        float most[PANEL], last[PANEL] = {0};
        if (p->signs) {
            const int64_t column = i % across * PANEL;
            const int n = (int)(p->columns - column < PANEL ? p->columns - column : PANEL);
            most[0] = transformed_amax(p, i / across * GROUP, column, n, all);
        } else {
            const int64_t start = i * chunk, size = count - start < chunk ? count - start : chunk;
            const int rows = (int)(size / PANEL), rest = (int)(size % PANEL);
            if (p->dtype != FP32) most[0] = flat_amax((const uint16_t *)p->x + start, (int64_t)rows * PANEL, p->dtype);
            else tile_amax(p->x, start, PANEL, rows, PANEL, PANEL, most);
            tile_amax(p->x, start + (int64_t)rows * PANEL, PANEL, 1, rest, PANEL, last);
        }
        all = most[0] > all ? most[0] : all;
        all = last[0] > all ? last[0] : all;
    }
    return p->signs ? as_float((uint32_t)bf16(all * 0.25f) << 16) : all;
}

/* Codes and scales that are stored, to be read as operand values in the axes of the tensor itself. */
typedef struct {
    const uint8_t *codes; /* rows x columns, or columns x rows where they are transposed; packed along the last axis */
    const void *scale_inv; /* per tile; float, or uint8 under RULE_E8M0 and RULE_NVFP4; unused under RULE_TENSOR */
    uint16_t *out;        /* rows x columns */
    int64_t rows, columns, tile_rows, tile_columns;
    int64_t scale_row, scale_column; /* from one scale to that of the next tile */
    int32_t rule, transposed, packed, threads, mantissa_bits, bias, bits, infinity, nan; /* without: above all codes */
    float range_multiplier;
} stored;

#define WIDE 256
typedef uint8_t bytes __attribute__((vector_size(GROUP)));
typedef uint64_t longs __attribute__((vector_size(GROUP)));

/* GROUP x GROUP bytes transposed: a perfect shuffle of all of them, four times. */
ALWAYS void transpose(const uint8_t *in, int64_t in_stride, uint8_t *out, int64_t out_stride) {
    bytes v[GROUP], w[GROUP];
#pragma GCC unroll 16
    for (int r = 0; r < GROUP; r++) memcpy(&v[r], in + r * in_stride, sizeof v[r]);
#pragma GCC unroll 4
    for (int turn = 0; turn < 4; turn++) {
#pragma GCC unroll 8
        for (int r = 0; r < GROUP / 2; r++) {
            const bytes a = v[r], b = v[r + GROUP / 2];
            w[2 * r] = ZIP(a, b, 0);
            w[2 * r + 1] = ZIP(a, b, 8);
        }
        memcpy(v, w, sizeof v);
    }
#pragma GCC unroll 16
    for (int r = 0; r < GROUP; r++) memcpy(out + r * out_stride, &v[r], sizeof v[r]);
}

/* One byte per code of a line that is stored. */
ALWAYS void unpack(const uint8_t *restrict in, uint8_t *restrict to, int count, const int packed) {
    if (!packed) { memcpy(to, in, (size_t)count); return; }
    for (int i = 0; i < count / 2; i++) { to[2 * i] = in[i] & 15; to[2 * i + 1] = in[i] >> 4; }
    if (count % 2) to[count - 1] = in[count / 2] & 15;
}

/* `unpack` for GROUP packed codes. */
ALWAYS void unpack_group(const uint8_t *in, uint8_t *to) {
    uint64_t packed;
    memcpy(&packed, in, sizeof packed);
    const bytes both = (bytes)(longs){packed, 0}; /* in registers: a load after a shorter store would wait for it */
    const bytes low = both & 15, high = both >> 4, codes = ZIP(low, high, 0);
    memcpy(to, &codes, sizeof codes);
}

/* One byte per code of `rows` <= GROUP rows and n <= WIDE columns of the tensor. */
ALWAYS void read_codes(const stored *p, int64_t row, int64_t column, int rows, int n, uint8_t code[GROUP][WIDE]) {
    const int64_t first = p->transposed ? row : column, line = p->transposed ? column : row; /* of what is stored */
    const int64_t length = p->transposed ? p->rows : p->columns, stride = p->packed ? (length + 1) / 2 : length;
    const uint8_t *from = p->codes + line * stride + (p->packed ? first / 2 : first);
    if (!p->transposed) {
        for (int r = 0; r < rows; r++) unpack(from + r * stride, code[r], n, p->packed);
        return;
    }
    for (int start = 0; start < n; start += GROUP, from += GROUP * stride) {
        const int count = n - start < GROUP ? n - start : GROUP, is_full = count == GROUP && rows == GROUP;
        uint8_t lines[GROUP][GROUP] = {{0}};
        if (is_full && !p->packed) {
            transpose(from, stride, code[0] + start, WIDE);
            continue;
        }
        for (int r = 0; is_full && r < GROUP; r++) unpack_group(from + r * stride, lines[r]);
        for (int r = 0; !is_full && r < count; r++) unpack(from + r * stride, lines[r], rows, p->packed);
        transpose(lines[0], GROUP, code[0] + start, WIDE);
    }
}

/* Scales of the tiles in n columns of a row of the tensor: each rounded to BF16, as torch's product of two BF16 numbers
 * has them. */
ALWAYS void read_scales(const stored *p, int64_t row, int64_t column, int n, float *scale) {
    const int size = (int)p->tile_columns; /* divides WIDE, and so `column` */
    const int64_t first = row / p->tile_rows * p->scale_row + column / size * p->scale_column;
    const int tiles = (n + size - 1) / size;
    if (p->rule == RULE_FP32) {
        const float *from = (const float *)p->scale_inv + first;
        for (int t = 0; t < tiles; t++) scale[t] = from[t * p->scale_column];
    } else {
        const uint8_t *from = (const uint8_t *)p->scale_inv + first;
        uint32_t code[WIDE];
        for (int t = 0; t < tiles; t++) code[t] = from[t * p->scale_column];
        for (int t = 0; p->rule == RULE_E8M0 && t < tiles; t++) scale[t] = as_float(code[t] == 0 ? 0x400000 : code[t] << 23);
        for (int t = 0; p->rule != RULE_E8M0 && t < tiles; t++) /* E4M3, never negative */
            scale[t] = as_float((code[t] & 0x7F) << 20) * 0x1p120f;
    }
    for (int t = 0; t < tiles; t++) scale[t] = as_float((uint32_t)bf16(scale[t] * p->range_multiplier) << 16);
}

/* What holds for all codes of a format. */
typedef struct { uint32_t sign_bit, infinity, nan, normal, lift; int up, sign_shift; float rebias, step; } code_rule;

ALWAYS code_rule code_rule_of(const stored *p) {
    const int m = p->mantissa_bits;
    const code_rule q = {
        1u << (p->bits - 1), (uint32_t)p->infinity, (uint32_t)p->nan, 1u << m, (uint32_t)(127 - p->bias) << 23,
        23 - m, 32 - p->bits, as_float((uint32_t)(254 - p->bias) << 23), as_float((uint32_t)(128 - p->bias - m) << 23)};
    return q;
}

/* Bits of a code's value times a scale, rounded to BF16 in the upper half; the lower one is to be cut off.
 * `is_scaled`: without a scale the value is exact in BF16. `has_special`: whether the format has NaN or infinity. */
ALWAYS uint32_t value_of(const code_rule *q, uint32_t code, float scale, const int is_scaled, const int has_special) {
    const uint32_t magnitude = code & (q->sign_bit - 1);
    uint32_t bits = as_bits(as_float(magnitude << q->up) * q->rebias); /* exact for subnormals, see `load` */
    /* Half of the codes without special values are these subnormals, of which a multiplication is slow. */
    if (!has_special) bits = magnitude < q->normal ? as_bits((float)(int32_t)magnitude * q->step) : (magnitude << q->up) + q->lift;
    if (has_special) bits = magnitude == q->infinity ? 0x7F800000 : bits;
    if (has_special) bits = magnitude >= q->nan ? 0x7FC00000 : bits;
    bits |= (code & q->sign_bit) << q->sign_shift;
    if (!is_scaled) return bits;
    bits = as_bits(as_float(bits) * scale);
    return bits + 0x7FFF + ((bits >> 16) & 1);
}

/* Values of n <= WIDE codes of a row. `scale` is per tile or, where tiles are narrow, per column: whole tiles in the order
 * of `pair_up`. */
ALWAYS void decode_row(const stored *p, const uint8_t *code, int n, const float *scale, uint16_t *out, const int is_scaled,
                       const int is_wide, const int has_special) {
    const code_rule q = code_rule_of(p);
    const int tile = is_wide ? TILE : PAIRED, half = tile / 2, whole = n / tile * tile;
    const int shift = __builtin_ctz((unsigned)p->tile_columns);
    uint32_t two[WIDE / 2]; /* codes of an integer; a loop that also widened them would have vectors of half the width */
    for (int k = 0; k < whole / 2; k++) two[k] = ((const code_pair *)code)[k];
    for (int start = 0; start < whole; start += tile) {
        const uint32_t *in = two + start / 2;
        const float *from = is_wide ? scale + (start >> shift) : scale + start;
        pair *to = (pair *)(out + start);
#pragma GCC unroll 1 /* as in `operand_step` */
#pragma GCC ivdep
        for (int k = 0; k < half; k++) {
            const float first_scale = from[is_wide ? 0 : k], second_scale = from[is_wide ? 0 : half + k];
            const uint32_t first = value_of(&q, in[k] & 0xFF, first_scale, is_scaled, has_special);
            const uint32_t second = value_of(&q, in[k] >> 8, second_scale, is_scaled, has_special);
            to[k] = first >> 16 | (second & 0xFFFF0000);
        }
    }
    for (int c = whole; c < n; c++)
        out[c] = (uint16_t)(value_of(&q, code[c], scale[is_wide ? c >> shift : c], is_scaled, has_special) >> 16);
}

#define DECODE(is_scaled, is_wide, has_special) \
    static __attribute__((noinline)) void decode_##is_scaled##_##is_wide##_##has_special( \
        const stored *p, const uint8_t *code, int n, const float *scale, uint16_t *out) { \
        decode_row(p, code, n, scale, out, is_scaled, is_wide, has_special); \
    }
DECODE(0, 1, 1) DECODE(1, 0, 0) DECODE(1, 0, 1) DECODE(1, 1, 0) DECODE(1, 1, 1)

static void decode_for(const stored *p, const uint8_t *code, int n, const float *scale, uint16_t *out) {
    const int has_special = (p->infinity < p->nan ? p->infinity : p->nan) < 1 << (p->bits - 1);
    const int is_wide = p->tile_columns >= TILE;
    if (p->rule == RULE_TENSOR) decode_0_1_1(p, code, n, scale, out);
    else if (is_wide && has_special) decode_1_1_1(p, code, n, scale, out);
    else if (is_wide) decode_1_1_0(p, code, n, scale, out);
    else if (has_special) decode_1_0_1(p, code, n, scale, out);
    else decode_1_0_0(p, code, n, scale, out);
}

/* The blocks of GROUP x WIDE that decoding and laying out work on, as a loop over them all. */
typedef struct { int64_t row, column; int rows, n; } block;

ALWAYS int64_t blocks_of(const stored *p) { return (p->rows + GROUP - 1) / GROUP * ((p->columns + WIDE - 1) / WIDE); }

ALWAYS block block_of(const stored *p, int64_t i) {
    const int64_t across = (p->columns + WIDE - 1) / WIDE, row = i / across * GROUP, column = i % across * WIDE;
    const int64_t rows = p->rows - row, n = p->columns - column;
    return (block){row, column, rows < GROUP ? (int)rows : GROUP, n < WIDE ? (int)n : WIDE};
}

/* The sizes of the structures, which kernel.py compares with its structures. */
int64_t bridge_pass_bytes(void) { return (int64_t)sizeof(pass); }

int64_t bridge_stored_bytes(void) { return (int64_t)sizeof(stored); }

void bridge_decode(const stored *p) {
#pragma omp parallel for num_threads(p->threads) schedule(static)
    for (int64_t i = 0; i < blocks_of(p); i++) {
        const block b = block_of(p, i);
        uint8_t code[GROUP][WIDE];
        float tile[WIDE], scale[WIDE], paired[WIDE];
        const int is_narrow = p->tile_columns < TILE;
        read_codes(p, b.row, b.column, b.rows, b.n, code);
        for (int r = 0; r < b.rows; r++) {
            const int64_t row = b.row + r;
            if (p->rule != RULE_TENSOR && (r == 0 || row % p->tile_rows == 0)) {
                read_scales(p, row, b.column, b.n, tile);
                if (is_narrow) spread(tile, scale, b.n, (int)p->tile_columns);
                if (is_narrow) pair_up(scale, paired, b.n);
                for (int c = b.n / PAIRED * PAIRED; is_narrow && c < b.n; c++) paired[c] = scale[c];
            }
            decode_for(p, code[r], b.n, is_narrow ? paired : tile, p->out + row * p->columns + b.column);
        }
    }
}

/* Codes of a byte each, transposed where `transposed` says so, into `out` in bytes, two to a byte with `packs`. */
void bridge_lay_out(const stored *p, int packs) {
    uint8_t *out = (uint8_t *)p->out;
#pragma omp parallel for num_threads(p->threads) schedule(static)
    for (int64_t i = 0; i < blocks_of(p); i++) {
        const block b = block_of(p, i);
        uint8_t code[GROUP][WIDE];
        read_codes(p, b.row, b.column, b.rows, b.n, code);
        for (int r = 0; r < b.rows; r++) {
            uint8_t *restrict to = out + (b.row + r) * (packs ? (p->columns + 1) / 2 : p->columns);
            const uint8_t *restrict from = code[r];
            if (!packs) { memcpy(to + b.column, from, (size_t)b.n); continue; }
            to += b.column / 2;
            for (int c = 0; c < b.n / 2; c++) to[c] = (uint8_t)(from[2 * c] | from[2 * c + 1] << 4);
            if (b.n % 2) to[b.n / 2] = from[b.n - 1];
        }
    }
}
