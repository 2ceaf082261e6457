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

// The encoder's fixed point: a block is scaled so that its RMS is this integer.
#define TQ_RMS_ONE 2048

// Scales the encoder tries for each block.
#define TQ_N_CANDIDATES 8

// ---- tq3 ----

#define TQ3_LEVEL_UNIT (1.0f / 53)

static const int8_t TQ3_LEVELS[4] = {13, 40, 71, 114};

// Ends of the cells for candidate k: round(TQ_RMS_ONE * r[k] * (L[j] + L[j+1]) / 2 * TQ3_LEVEL_UNIT), with
// r[k] = scale / the scale that fits the block's RMS = 0.7500, 0.8214, 0.8929, 0.9643, 1.0357, 1.1071, 1.1786, 1.2500
static const int16_t TQ3_CANDIDATE_THRESHOLDS[TQ_N_CANDIDATES][3] = {
    { 768, 1608, 2681},
    { 841, 1762, 2936},
    { 914, 1915, 3191},
    { 987, 2068, 3447},
    {1061, 2221, 3702},
    {1134, 2374, 3957},
    {1207, 2528, 4213},
    {1280, 2681, 4468},
};

// ---- tq4 ----

#define TQ4_LEVEL_UNIT (1.0f / 31)

static const int8_t TQ4_LEVELS[8] = {4, 12, 20, 29, 39, 50, 64, 85};

// Ends of the cells for candidate k: round(TQ_RMS_ONE * r[k] * (L[j] + L[j+1]) / 2 * TQ4_LEVEL_UNIT), with
// r[k] = scale / the scale that fits the block's RMS = 0.7000, 0.7643, 0.8286, 0.8929, 0.9571, 1.0214, 1.0857, 1.1500
static const int16_t TQ4_CANDIDATE_THRESHOLDS[TQ_N_CANDIDATES][7] = {
    { 370,  740, 1133, 1572, 2058, 2636, 3445},
    { 404,  808, 1237, 1717, 2247, 2878, 3762},
    { 438,  876, 1341, 1861, 2436, 3120, 4078},
    { 472,  944, 1445, 2006, 2625, 3362, 4394},
    { 506, 1012, 1549, 2150, 2814, 3604, 4711},
    { 540, 1080, 1653, 2294, 3003, 3846, 5027},
    { 574, 1148, 1757, 2439, 3192, 4088, 5344},
    { 608, 1216, 1861, 2583, 3381, 4331, 5660},
};

#endif // TQ_CODEBOOK_H
