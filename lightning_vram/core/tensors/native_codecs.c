// What codecs.py does in a dozen operators, and a step of AdamW between the two, in one pass each,
// to the same bits. Compiled on the machine that runs it: see native_codecs.py. No state, no libraries.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) // or GCC 12 does not vectorise it
#define PORTION 16384  // numbers that a thread takes at a time
#define PIECE 2048     // of those as many as are joined and split in the nearest cache; whole rows
#define ROW 128        // numbers with one scale; rows of smaller tensors are shorter
#define STRIDE 40503u  // as in codecs.py
#define INFINITE 0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u

INLINE uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

INLINE float number_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

INLINE int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

INLINE float widened(uint16_t kept) { return number_of((uint32_t)kept << 16); }

INLINE uint16_t rounded(float number, uint32_t draw) {
  const uint32_t bits = bits_of(number), regular = (bits & 0x7FFFFFFFu) > INFINITE ? NOT_A_NUMBER : bits;
  return (uint16_t)((regular + (draw & 0xFFFFu)) >> 16);
}

APART void decode_row(const uint8_t *restrict record, float *restrict numbers, int64_t count, int bits,
                      int is_positive, int64_t size) {
  uint8_t codes[ROW + 1];
  float scale;
  memcpy(&scale, record + size * bits / 8, sizeof scale);
  if (bits == 8) memcpy(codes, record, (size_t)count);
  else
    for (int64_t i = 0; i < (count + 1) / 2; i++) {
      codes[2 * i] = record[i] & 0xF;
      codes[2 * i + 1] = record[i] >> 4;
    }
  const float step = bits == 8 ? 0x1p-8f : 0x1p-4f, half = bits == 8 ? 127.0f : 7.0f;
  if (is_positive)
    for (int64_t i = 0; i < count; i++) {
      const float root = ((float)codes[i] + 1.0f) * step;
      numbers[i] = root * root * scale;
    }
  else
    for (int64_t i = 0; i < count; i++) {
      const float root = ((float)codes[i] - half) * (2.0f * step);
      numbers[i] = root * fabsf(root) * scale;
    }
}

INLINE int32_t in_order(float number) { // as numbers are, and back
  const int32_t bits = (int32_t)bits_of(number);
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

INLINE float from_order(int32_t place) { return number_of((uint32_t)(place ^ (place >> 31 & 0x7FFFFFFF))); }

APART void encode_row(const float *restrict numbers, uint8_t *restrict record, int64_t count, int bits,
                      int is_positive, int64_t size) {
  const float all = bits == 8 ? 256.0f : 16.0f, half = all / 2.0f;
  int32_t highest = INT32_MIN, lowest = INT32_MAX;
  for (int64_t i = 0; i < count; i++) {
    const int32_t place = in_order(numbers[i]);
    highest = place > highest ? place : highest;
    lowest = place < lowest ? place : lowest;
  }
  const float largest = from_order(highest), smallest = from_order(lowest);
  const int is_odd = highest >= (int32_t)INFINITE || lowest <= in_order(-INFINITY);
  const float scale = is_odd ? NAN : -smallest > largest ? smallest : largest;
  const float divisor = fabsf(scale) > 0.0f ? scale : 1.0f;
  uint8_t codes[ROW + 1];
  memset(codes, is_positive ? 0 : (int)half - 1, sizeof codes);
  if (is_positive && !is_odd)
    for (int64_t i = 0; i < count; i++) {
      const float code = nearbyintf(sqrtf(numbers[i] / divisor) * all) - 1.0f;
      codes[i] = (uint8_t)(int32_t)(code > 0.0f ? code : 0.0f);
    }
  else if (!is_odd)
    for (int64_t i = 0; i < count; i++) {
      const float ratio = numbers[i] / divisor;
      const float code = nearbyintf(copysignf(sqrtf(fabsf(ratio)), ratio) * half) + (half - 1.0f);
      codes[i] = (uint8_t)(int32_t)(code > 0.0f ? code : 0.0f);
    }
  if (bits == 8) memcpy(record, codes, (size_t)size);
  else
    for (int64_t i = 0; i < size / 2; i++) record[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
  memcpy(record + size * bits / 8, &scale, sizeof scale);
}

// codecs.rounded_by_place: `draw` is that of the first place.
void round_by_place(const float *restrict numbers, uint16_t *restrict kept, int64_t count, uint32_t draw, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += PORTION)
    for (int64_t i = first; i < least(first + PORTION, count); i++)
      kept[i] = rounded(numbers[i], draw + (uint32_t)i * STRIDE);
}

// LowBitTensor.decode: records of `size` codes and their scale, of which the last may be filled up.
void decode_low_bit(const uint8_t *records, float *numbers, int64_t count, int bits, int is_positive, int64_t size,
                    int threads) {
  const int64_t record_bytes = size * bits / 8 + (int64_t)sizeof(float);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < (count + size - 1) / size; row++)
    decode_row(records + row * record_bytes, numbers + row * size, least(size, count - row * size), bits, is_positive,
               size);
}

// LowBitTensor.take_over.
void encode_low_bit(const float *numbers, uint8_t *records, int64_t count, int bits, int is_positive, int64_t size,
                    int threads) {
  const int64_t record_bytes = size * bits / 8 + (int64_t)sizeof(float);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < (count + size - 1) / size; row++)
    encode_row(numbers + row * size, records + row * record_bytes, least(size, count - row * size), bits, is_positive,
               size);
}

typedef struct {
  float decay, share, beta2, square_share, root, eps, rate;
} Settings;

// What torch's fused AdamW does for each number, rounding as that does where it is vectorised; returns the weight.
INLINE float stepped(float weight, float gradient, float *average, float *square, Settings by) {
  *average = fmaf(by.share, gradient - *average, *average);
  *square = fmaf(by.square_share * gradient, gradient, *square * by.beta2);
  return weight * by.decay + by.rate * *average / (sqrtf(*square) / by.root + by.eps);
}

INLINE void step_wide(float *restrict weights, const float *restrict gradient, float *restrict average,
                      float *restrict square, int64_t count, Settings by) {
  for (int64_t i = 0; i < count; i++) {
    float own_average = average[i], own_square = square[i];
    weights[i] = stepped(weights[i], gradient[i], &own_average, &own_square, by);
    average[i] = own_average;
    square[i] = own_square;
  }
}

INLINE void step_bf16(float *restrict weights, const float *restrict gradient, uint16_t *restrict average,
                      uint16_t *restrict square, int64_t count, Settings by, const uint32_t *draws, uint32_t place) {
  const uint32_t draw = draws[0] + place * STRIDE, square_draw = draws[1] + place * STRIDE;
  for (int64_t i = 0; i < count; i++) {
    float own_average = widened(average[i]), own_square = widened(square[i]);
    weights[i] = stepped(weights[i], gradient[i], &own_average, &own_square, by);
    average[i] = rounded(own_average, draw + (uint32_t)i * STRIDE);
    square[i] = rounded(own_square, square_draw + (uint32_t)i * STRIDE);
  }
}

INLINE void step_low_bit(float *weights, const float *gradient, uint8_t *average, uint8_t *square, int64_t count,
                         Settings by, int bits) {
  const int64_t record_bytes = ROW * bits / 8 + (int64_t)sizeof(float);
  float wide_average[ROW], wide_square[ROW];
  for (int64_t first = 0; first < count; first += ROW, average += record_bytes, square += record_bytes) {
    const int64_t here = least(ROW, count - first);
    decode_row(average, wide_average, here, bits, 0, ROW);
    decode_row(square, wide_square, here, bits, 1, ROW);
    step_wide(weights + first, gradient + first, wide_average, wide_square, here, by);
    encode_row(wide_average, average, here, bits, 0, ROW);
    encode_row(wide_square, square, here, bits, 1, ROW);
  }
}

// Moments begin at the place `at` of those in memory.
INLINE void step_some(float *weights, const float *gradient, void *average, void *square, int64_t at, int64_t count,
                      Settings by, int bits, const uint32_t *draws) {
  const int64_t record = at / ROW * (ROW * bits / 8 + (int64_t)sizeof(float));
  if (bits == 16)
    step_bf16(weights, gradient, (uint16_t *)average + at, (uint16_t *)square + at, count, by, draws, (uint32_t)at);
  else if (bits == 32) step_wide(weights, gradient, (float *)average + at, (float *)square + at, count, by);
  else step_low_bit(weights, gradient, (uint8_t *)average + record, (uint8_t *)square + record, count, by, bits);
}

// Settings: 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, the root of the second correction, eps, minus lr divided
// by the first correction. `draws`: of the first number, for each moment.
void step_adamw(float *weights, const float *gradient, void *average, void *square, int64_t count, int bits,
                const float *settings, const uint32_t *draws, int threads) {
  const Settings by = {settings[0], settings[1], settings[2], settings[3], settings[4], settings[5], settings[6]};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < count; at += PORTION)
    step_some(weights + at, gradient + at, average, square, at, least(PORTION, count - at), by, bits, draws);
}

INLINE float joined(uint16_t upper, int16_t lower) {
  return number_of(((uint32_t)upper << 16) + (uint32_t)(int32_t)lower);
}

// Returns other than 0 where sixteen bits do not tell it apart.
INLINE uint32_t split_one(float weight, uint16_t *upper, int16_t *lower) {
  const uint32_t bits = bits_of(weight), nearest = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const uint32_t kept = (bits & 0x7FFFFFFFu) > INFINITE ? 0xFFFFu : nearest; // what torch makes of NaN
  const uint32_t lacking = bits - (kept << 16);
  *upper = (uint16_t)kept;
  *lower = (int16_t)lacking;
  return (lacking + 0x8000u) >> 16;
}

APART void join(const uint16_t *restrict upper, const int16_t *restrict lower, float *restrict weights, int64_t count) {
  for (int64_t i = 0; i < count; i++) weights[i] = joined(upper[i], lower[i]);
}

// Returns whether sixteen bits do not tell apart one of them.
APART int split(const float *restrict weights, uint16_t *restrict upper, int16_t *restrict lower, int64_t count) {
  uint32_t odd = 0;
  for (int64_t i = 0; i < count; i++) odd |= split_one(weights[i], upper + i, lower + i);
  return odd != 0;
}

// Join, step and split in one loop, where moments are plain numbers. Returns whether `split` is to look at the weights
// again: sixteen bits may not tell one apart, or one is no number.
INLINE int step_joined(uint16_t *restrict upper, int16_t *restrict lower, const void *restrict gradient, int is_narrow,
                       float factor, void *restrict average, void *restrict square, float *restrict weights,
                       int64_t count, Settings by, int bits, const uint32_t *draws, uint32_t place) {
  const uint32_t draw = draws[0] + place * STRIDE, square_draw = draws[1] + place * STRIDE;
  float *const wide_average = average, *const wide_square = square;
  uint16_t *const half_average = average, *const half_square = square;
  uint32_t nearest_odd = UINT32_MAX, largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const float own_gradient =
      is_narrow ? widened(((const uint16_t *)gradient)[i]) * factor : ((const float *)gradient)[i];
    float own_average = bits == 16 ? widened(half_average[i]) : wide_average[i];
    float own_square = bits == 16 ? widened(half_square[i]) : wide_square[i];
    weights[i] = stepped(joined(upper[i], lower[i]), own_gradient, &own_average, &own_square, by);
    if (bits == 16) {
      half_average[i] = rounded(own_average, draw + (uint32_t)i * STRIDE);
      half_square[i] = rounded(own_square, square_draw + (uint32_t)i * STRIDE);
    } else {
      wide_average[i] = own_average;
      wide_square[i] = own_square;
    }
    const uint32_t own = bits_of(weights[i]), size = own & 0x7FFFFFFFu, distance = (own & 0x1FFFFu) ^ 0x8000u;
    upper[i] = (uint16_t)((own + 0x7FFFu + (own >> 16 & 1u)) >> 16);
    lower[i] = (int16_t)own;
    nearest_odd = distance < nearest_odd ? distance : nearest_odd; // a half that is rounded down to an even one
    largest = size > largest ? size : largest;
  }
  return nearest_odd == 0 || largest > INFINITE;
}

typedef int StepJoined(uint16_t *restrict, int16_t *restrict, const void *restrict, float, void *restrict,
                       void *restrict, float *restrict, int64_t, Settings, const uint32_t *, uint32_t);

#define STEP_JOINED(name, is_narrow, bits) /* each is vectorised by itself */                                          \
  APART int name(uint16_t *restrict upper, int16_t *restrict lower, const void *restrict gradient, float factor,       \
                 void *restrict average, void *restrict square, float *restrict weights, int64_t count, Settings by,   \
                 const uint32_t *draws, uint32_t place) {                                                              \
    return step_joined(upper, lower, gradient, is_narrow, factor, average, square, weights, count, by, bits, draws,    \
                       place);                                                                                         \
  }
STEP_JOINED(step_narrow_32, 1, 32)
STEP_JOINED(step_narrow_16, 1, 16)
STEP_JOINED(step_wide_32, 0, 32)
STEP_JOINED(step_wide_16, 0, 16)

// The same with weights as SplitWeights has them, and a gradient in bf16, which is multiplied, or in float32. Of weights
// that sixteen bits do not tell apart there are places and true upper halves; returns how many there are then, whose
// places and halves, in some order, come to `found`.
int64_t step_split(uint16_t *upper, int16_t *lower, const void *gradient, int is_narrow, float factor, void *average,
                   void *square, int64_t count, int bits, const float *settings, const uint32_t *draws,
                   const int32_t *places, const uint16_t *halves, int64_t num_odd, int32_t *found, int threads) {
  const Settings by = {settings[0], settings[1], settings[2], settings[3], settings[4], settings[5], settings[6]};
  int64_t num_found = 0;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < count; at += PIECE) {
    const int64_t here = least(PIECE, count - at);
    float weights[PIECE], wide[PIECE];
    int is_odd = 0, was_odd = 0;
    for (int64_t k = 0; k < num_odd; k++) was_odd |= places[k] >= at && places[k] < at + here;
    if (!was_odd && bits >= 16) {
      const int64_t size = bits / 8;
      const void *own = (const char *)gradient + at * (is_narrow ? 2 : 4);
      void *own_average = (char *)average + at * size, *own_square = (char *)square + at * size;
      StepJoined *const step = is_narrow ? bits == 16 ? step_narrow_16 : step_narrow_32
                                         : bits == 16 ? step_wide_16 : step_wide_32;
      is_odd = step(upper + at, lower + at, own, factor, own_average, own_square, weights, here, by, draws, (uint32_t)at) &&
               split(weights, upper + at, lower + at, here);
    } else {
      join(upper + at, lower + at, weights, here);
      for (int64_t k = 0; k < num_odd; k++)
        if (places[k] >= at && places[k] < at + here)
          weights[places[k] - at] = number_of((uint32_t)halves[k] << 16 | (uint16_t)lower[places[k]]);
      if (is_narrow)
        for (int64_t i = 0; i < here; i++) wide[i] = widened(((const uint16_t *)gradient)[at + i]) * factor;
      step_some(weights, is_narrow ? wide : (const float *)gradient + at, average, square, at, here, by, bits, draws);
      is_odd = split(weights, upper + at, lower + at, here);
    }
    if (is_odd)
      for (int64_t i = 0; i < here; i++) {
        const uint32_t number = bits_of(weights[i]), lacking = number - ((uint32_t)upper[at + i] << 16);
        if ((lacking + 0x8000u) >> 16 == 0) continue;
        int64_t place;
#pragma omp atomic capture
        place = num_found++;
        found[2 * place] = (int32_t)(at + i);
        found[2 * place + 1] = (int32_t)(number >> 16);
      }
  }
  return num_found;
}
