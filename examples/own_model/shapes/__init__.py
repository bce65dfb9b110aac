"""The network and the loss of this project, and a program that draws its images."""
