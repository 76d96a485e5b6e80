"""Above the chapters: one workload run through this engine and through others, measured the same way."""
