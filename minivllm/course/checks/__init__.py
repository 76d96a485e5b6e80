"""Above the chapters: one module of checks a chapter."""
