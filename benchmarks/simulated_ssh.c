/* In place of ssh: connects standard input and output to the process that plays all hosts (simulated_hosts.py).
 *
 * The socket's path stands in SIMULATED_HOSTS; the host's name is the first line that is sent.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void send_all(int to, const char *data, ssize_t size) {
    while (size > 0) {
        ssize_t written = write(to, data, size);
        if (written <= 0) exit(255);
        data += written;
        size -= written;
    }
}

int main(int count, char **words) {
    const char *host = NULL;
    for (int at = 1; at < count && host == NULL; at++) {
        if (!strcmp(words[at], "-G") || !strcmp(words[at], "-O")) return 0;
        if (words[at][0] != '-') host = words[at];
        else if (strlen(words[at]) == 2 && strchr("oFlpS", words[at][1])) at++;
    }
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, getenv("SIMULATED_HOSTS"), sizeof address.sun_path - 1);
    int line = socket(AF_UNIX, SOCK_STREAM, 0);
    while (connect(line, (struct sockaddr *)&address, sizeof address)) usleep(10000); /* its backlog is full */
    send_all(line, host, strlen(host));
    send_all(line, "\n", 1);
    static char data[1 << 16];
    struct pollfd ways[2] = {{.fd = 0, .events = POLLIN}, {.fd = line, .events = POLLIN}};
    for (;;) {
        poll(ways, 2, -1);
        if (ways[0].revents) {
            ssize_t size = read(0, data, sizeof data);
            if (size > 0) send_all(line, data, size);
            else {
                shutdown(line, SHUT_WR);
                ways[0].fd = -1;
            }
        }
        if (ways[1].revents) {
            ssize_t size = read(line, data, sizeof data);
            if (size <= 0) return 0;
            send_all(1, data, size);
        }
    }
}
