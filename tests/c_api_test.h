/* What the tests of the C interface share. */
#pragma once

#include <blocksparse/c_api.h>
#include <stdio.h>
#include <string.h>

extern int failures;

#define EXPECT(condition)                                                                  \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      printf("%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, bs_last_error()); \
      ++failures;                                                                          \
    }                                                                                      \
  } while (0)

#define EXPECT_ERROR(call, status, text)             \
  do {                                               \
    EXPECT((call) == (status));                      \
    EXPECT(strstr(bs_last_error(), (text)) != NULL); \
  } while (0)

void test_conv(void);
void test_glu(void);
void test_recurrent(void);
