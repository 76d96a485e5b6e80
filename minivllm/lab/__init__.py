"""Above the chapters: measuring and showing what the engine does."""
