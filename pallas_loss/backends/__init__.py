"""Backends: each answers the questions of ``base.LinearBackend``, and knows nothing of autodiff."""
