// The same for tests, which all include doctest.
#include "doctest/doctest.h"
#include "precompiled.h"
