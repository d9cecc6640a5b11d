"""The contract between processes: messages, errors, server and channel set-up."""
