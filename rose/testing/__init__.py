"""What tests, benchmarks and people who try things out put in the place of a real engine; no daemon imports it."""
