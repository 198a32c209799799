"""What every process shows of itself: metrics, logs, traces, and the page that has them."""
