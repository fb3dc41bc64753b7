"""What a deployment needs beside the packages: keys, container files, the two apps to submit."""
