"""The processes of one worker that share a model."""
