"""What demo, simulator and benchmarks share: traffic to replay, figures with their noise, charts."""
