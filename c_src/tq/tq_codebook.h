// DO NOT EDIT. Written by scripts/generate_codebooks.py; to change it, edit tq_ggml/codebooks.py and run
//
//     python scripts/generate_codebooks.py
//
// Lloyd-Max codebooks of one coordinate of a randomly rotated unit vector in R^d, from its density
//
//     f(t) = C (1 - t^2)^((d-3)/2),  -1 <= t <= 1,  C = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2))
//
// scaled by sqrt(d) so that sigma = 1 (d = infinity: the standard normal). Each level is the mean of its cell, each
// cell ends halfway between two levels. Here d = infinity. Tables are symmetric; only magnitudes are listed.
//
//     1 bit, D_mse 0.363380228:
//         0.797884561
//     2 bit, D_mse 0.117481848:
//         0.452780035  1.510417608
//     3 bit, D_mse 0.034547761:
//         0.245094179  0.756005281  1.343909279  2.151945705
//     4 bit, D_mse 0.009501008:
//         0.128395030  0.388048299  0.656759119  0.942340456
//         1.256231197  1.618046386  2.069017227  2.732589571
//
// Kernels use integer levels, level = integer * LEVEL_UNIT in units of sigma, and decode to
// fp16 scale * (+-integer) / 32. The integers come from the multiplier that costs the least D_mse:
//
//     3 bit, multiplier 53, D_mse 0.034549126
//     4 bit, multiplier 31, D_mse 0.009513053

#ifndef TQ_CODEBOOK_H
#define TQ_CODEBOOK_H

#include <stdint.h>

// Fixed +-1 before the Walsh-Hadamard transform: bit i set negates element i.
// Bit i is the top bit of (i+1) * 0x9E3779B9 mod 2^32 (Fibonacci hashing).
static const uint32_t TQ_SIGN_MASK = 0xB4B5A5A5u;

// Scales the encoder tries for each block.
#define TQ_N_CANDIDATES 8

// Magnitudes, as fractions of the block's largest, that the search for the scale tells apart.
#define TQ_N_BUCKETS 32

// What the encoder of a type looks up. It holds magnitudes in bytes: first as a bucket, which is the fraction of the
// block's largest in 31sts, rounded; then, with the chosen scale, in steps, rounded down. Rows of 16 bytes are one
// register's table look-up in any SIMD instruction set.
typedef struct {
    uint8_t levels[16];
    uint8_t index[16];       // a level's index is the high half of steps + index[steps / 16], mod 256
    uint8_t half_steps[16];  // of a level, less 1, mod 256: 2 * steps less this is from the middle of the step
    float   half_step;       // in level units
    float   steps[TQ_N_CANDIDATES];  // of the block's largest
    float   scale[TQ_N_CANDIDATES];  // fp16 scale / the block's largest before the transform is divided by sqrt(32)
    uint8_t errors[TQ_N_CANDIDATES][TQ_N_BUCKETS];  // squared
} tq_encoder;

// ---- tq3 ----

#define TQ3_LEVEL_UNIT (1.0f / 53)

static const int8_t TQ3_LEVELS[4] = {13, 40, 71, 114};

// Candidate scales / the scale whose largest level is the block's largest magnitude:
// 0.75, 0.80, 0.84, 0.88, 0.92, 0.96, 1.00, 1.05
static const tq_encoder TQ3_ENCODER = {
    {13, 40, 71, 114},
    {0, 240, 232, 224, 208, 205, 192, 176, 165, 160, 144, 128, 112, 96, 80, 64},
    {38, 119, 212, 85},
    0.333333343f,
    {228.0f, 213.75f, 203.571426f, 194.318176f,
     185.869568f, 178.125f, 171.0f, 162.857147f},
    {0.0372161455f, 0.0396972224f, 0.0416820832f, 0.0436669439f,
     0.0456518047f, 0.0476366691f, 0.0496215299f, 0.0521026067f},
    {
        { 25,  12,   2,   1,   8,  24,  20,   6,   0,   3,  15,  34,  26,  10,   1,   2,
          10,  27,  53,  72,  45,  22,   7,   1,   3,  13,  32,  60,  96, 141, 194, 255},
        { 28,  15,   3,   0,   6,  20,  30,  13,   2,   1,   8,  23,  41,  26,   9,   1,
           2,  11,  28,  54,  83,  62,  34,  14,   3,   1,   6,  21,  44,  75, 115, 163},
        { 31,  17,   4,   0,   5,  18,  34,  20,   6,   0,   4,  15,  35,  43,  21,   7,
           1,   3,  14,  33,  61,  92,  70,  40,  18,   5,   0,   4,  17,  38,  67, 104},
        { 35,  19,   6,   0,   4,  16,  35,  28,  11,   2,   1,   9,  25,  49,  38,  17,
           5,   0,   5,  18,  39,  69, 101,  78,  46,  22,   7,   1,   3,  13,  32,  59},
        { 38,  22,   7,   1,   3,  13,  32,  38,  17,   5,   0,   5,  17,  38,  56,  33,
          14,   3,   1,   7,  22,  45,  77, 111,  87,  53,  27,  10,   2,   1,  10,  26},
        { 42,  25,   9,   1,   2,  11,  29,  45,  26,   9,   1,   2,  11,  28,  54,  53,
          28,  10,   2,   1,   9,  26,  51,  85, 121,  97,  60,  33,  14,   3,   1,   7},
        { 46,  28,  10,   2,   1,   9,  26,  49,  35,  15,   4,   0,   6,  19,  42,  67,
          47,  23,   8,   1,   2,  13,  31,  58,  94, 132, 106,  68,  39,  17,   5,   0},
        { 51,  32,  13,   3,   1,   7,  23,  46,  50,  25,   9,   1,   2,  11,  29,  55,
          73,  46,  22,   7,   1,   3,  13,  32,  59,  95, 139, 131,  88,  54,  28,  10},
    },
};

// ---- tq4 ----

#define TQ4_LEVEL_UNIT (1.0f / 31)

static const int8_t TQ4_LEVELS[8] = {4, 12, 20, 29, 39, 50, 64, 85};

// Candidate scales / the scale whose largest level is the block's largest magnitude:
// 0.90, 0.93, 0.96, 0.99, 1.02, 1.06, 1.26, 1.34
static const tq_encoder TQ4_ENCODER = {
    {4, 12, 20, 29, 39, 50, 64, 85},
    {0, 0, 0, 255, 252, 247, 240, 238, 224, 219, 208, 192, 176, 160, 144, 128},
    {15, 47, 79, 115, 155, 199, 255, 83},
    0.25f,
    {188.888885f, 182.7957f, 177.083328f, 171.717178f,
     166.666672f, 160.377365f, 134.920639f, 126.865669f},
    {0.059896104f, 0.0618926398f, 0.0638891757f, 0.0658857152f,
     0.0678822473f, 0.0705443025f, 0.0838545486f, 0.0891786441f},
    {
        { 21,   3,  10,  17,   2,  19,   7,   5,  27,   6,   6,  34,  13,   2,  27,  36,
           5,   8,  47,  70,  20,   1,  19,  73, 162, 152,  66,  16,   2,  23,  80, 172},
        { 22,   4,   9,  20,   2,  17,  12,   2,  26,  14,   2,  26,  28,   2,  12,  47,
          18,   2,  21,  74,  54,  10,   3,  31,  96, 189, 145,  61,  14,   2,  26,  84},
        { 24,   4,   8,  23,   2,  13,  19,   1,  19,  25,   2,  14,  40,   9,   4,  34,
          42,   6,   6,  41,  87,  37,   4,   8,  47, 122, 210, 138,  57,  12,   3,  28},
        { 26,   5,   7,  25,   3,   9,  24,   2,  12,  33,   5,   7,  40,  22,   2,  17,
          54,  21,   2,  18,  69,  80,  23,   2,  16,  66, 151, 224, 131,  53,  10,   2},
        { 28,   6,   6,  28,   5,   7,  28,   5,   7,  36,  13,   2,  28,  41,   6,   6,
          41,  47,   8,   4,  37,  96,  60,  13,   2,  27,  87, 184, 230, 124,  48,   7},
        { 30,   7,   5,  30,   9,   4,  29,  11,   3,  30,  28,   2,  13,  50,  22,   2,
          17,  61,  33,   3,  10,  51, 108,  56,  11,   3,  30,  93, 191, 255, 148,  62},
        { 46,  14,   2,  26,  40,   6,   6,  40,  27,   2,  13,  56,  33,   3,  10,  52,
          66,  17,   2,  22,  79,  71,  19,   2,  20,  75, 154, 105,  37,   4,   8,  45},
        { 52,  18,   2,  21,  52,  15,   2,  25,  51,  12,   2,  28,  68,  26,   2,  14,
          61,  76,  22,   2,  17,  69, 102,  38,   5,   7,  45, 119, 178,  94,  31,   1},
    },
};

#endif // TQ_CODEBOOK_H
