"""Takes pipelines of diffusers apart into a job's parts, and saves them again."""
