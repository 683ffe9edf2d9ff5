#include "program.h"

EXPORT_PROGRAM(float32, float)
