// Marks what the shared library shows; all else in it is hidden.
#pragma once

#if defined(_WIN32)
#define BS_EXPORT
#else
#define BS_EXPORT __attribute__((visibility("default")))
#endif
