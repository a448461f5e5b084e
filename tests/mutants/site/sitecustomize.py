"""Measures coverage in every Python process that is started where the tests are looked at."""

import coverage

coverage.process_startup()
