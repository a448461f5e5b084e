"""Is it the right training: first steps beside plain training, all steps beside a reference."""
