"""One harness for every benchmark: named workloads, candidates, clocks, results as JSON."""
