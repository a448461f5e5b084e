"""Exports of a sweep: for pandas, JUnit, Perfetto, and in the formats of the reference suites."""
