"""Pictures for models that read them: libmtmd, projectors, and what makes rows of pictures."""
