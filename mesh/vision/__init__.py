"""Pictures of requests: bytes to pixels in a confined process, pixels to rows in the encoder's process."""
