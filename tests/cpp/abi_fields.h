// Comparison of structs that this package declares by itself with those of an installed header.
#pragma once

#include <cstddef>

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs))
#define SAME_FIELD(ours, field, theirs, their_field)                      \
  static_assert(offsetof(ours, field) == offsetof(theirs, their_field) && \
                sizeof(decltype(ours::field)) == sizeof(decltype(theirs::their_field)))
// SAME_FIELD for each name, of up to 16 that both structs have.
#define SAME_FIELDS(ours, theirs, ...) EACH_FIELD_16(EACH_FIELD(ours, theirs, __VA_ARGS__))

// Expands to itself for the other names, which the preprocessor sees when it looks again.
#define EACH_FIELD(ours, theirs, name, ...) \
  SAME_FIELD(ours, name, theirs, name)      \
  __VA_OPT__(; EACH_FIELD_OF PARENTHESES(ours, theirs, __VA_ARGS__))
#define EACH_FIELD_OF() EACH_FIELD
#define PARENTHESES ()
#define EACH_FIELD_16(...) EACH_FIELD_4(EACH_FIELD_4(EACH_FIELD_4(EACH_FIELD_4(__VA_ARGS__))))
#define EACH_FIELD_4(...) LOOK_AGAIN(LOOK_AGAIN(LOOK_AGAIN(LOOK_AGAIN(__VA_ARGS__))))
#define LOOK_AGAIN(...) __VA_ARGS__
