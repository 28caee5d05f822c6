"""What operating the server needs beside the answers: who may call, what is seen from outside, and the log."""
