// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"errors"
	"os"
	"path"
	"path/filepath"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
	"github.com/cilium/networkdriver/test/lab/internal/image"
)

const (
	// TestImage is a container image that every node has: a shell with busybox's
	// programs, and iproute2's ip, arping and ethtool.
	TestImage = "networkdriver.test/busybox:1"

	pauseImage = "registry.k8s.io/pause:3.10"
)

// testPrograms of the node's packages come before busybox's in the test image:
// its ip knows no details of links.
var testPrograms = []string{
	"usr/bin/dash", "usr/bin/ip", "usr/bin/arping", "usr/sbin/ethtool",
}

var busyboxApplets = []string{
	"awk", "basename", "cat", "chmod", "cp", "cut", "date", "dd", "df", "dirname", "du", "echo", "env", "expr", "false", "find",
	"free", "grep", "head", "hexdump", "hostname", "httpd", "id", "kill", "ln", "ls", "md5sum", "mkdir", "mknod", "mount", "mv",
	"nc", "netstat", "nproc", "od", "ping", "ps", "pwd", "readlink", "realpath", "rm", "rmdir", "sed", "seq", "sleep", "sort", "stat",
	"tail", "tee", "test", "timeout", "top", "touch", "tr", "true", "umount", "uname", "uniq", "uptime", "vi", "wc", "wget",
	"which", "xargs", "yes",
}

// addImages writes the container images that nodes import.
func addImages(root, busybox string) error {
	libs, err := image.Libraries(root, testPrograms...)
	if err != nil {
		return err
	}
	test := image.Image{
		Name:  TestImage,
		Files: map[string]string{"bin/busybox": busybox},
		Links: map[string]string{
			"bin/sh":     "/usr/bin/dash", // busybox's shell would prefer its own ip
			image.Loader: "/" + image.LoaderTarget,
		},
		// Ends at once when asked to, which a bare sleep as process 1 does not.
		Cmd: []string{"/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000000000 & wait"},
	}
	for _, f := range append(libs, testPrograms...) {
		test.Files[f] = filepath.Join(root, f)
	}
	for _, applet := range busyboxApplets {
		test.Links["bin/"+applet] = "busybox"
	}
	pause := image.Image{
		Name:  pauseImage,
		Files: map[string]string{"bin/busybox": busybox},
		Links: map[string]string{"bin/sleep": "busybox"},
		Cmd:   []string{"/bin/sleep", "1000000000"},
	}
	dir := filepath.Join(root, guest.ImageDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, i := range map[string]image.Image{"pause": pause, "busybox": test} {
		f, err := os.Create(path.Join(dir, name+".tar"))
		if err != nil {
			return err
		}
		if err := errors.Join(i.Write(f), f.Close()); err != nil {
			return err
		}
	}
	return nil
}
