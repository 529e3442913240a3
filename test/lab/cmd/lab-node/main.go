// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command lab-node is the first program of an emulated node, in three roles.
// As /init of the initial RAM disk it loads the modules for the disk and
// switches to the root file system on it. As process 1 there it mounts and
// names what a node needs and reaps orphans. As its child it is the agent:
// it runs the node's daemons and whatever the lab asks for.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
)

// self is where the program is kept once the root file system is switched.
const self = "/run/lab-node"

func main() {
	role := "initrd"
	if os.Args[0] == self && len(os.Args) > 1 {
		role = os.Args[1]
	}
	var err error
	switch role {
	case "initrd":
		err = initrd()
	case "init":
		err = initProcess()
	case "agent":
		err = agent()
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "lab-node %s: %v\n", role, err)
	}
	if os.Getpid() == 1 {
		powerOff()
	}
	os.Exit(1)
}

func powerOff() {
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// initrd gets from the initial RAM disk to the root file system.
func initrd() error {
	for _, m := range []mount{
		{"proc", "/proc", "proc", 0, ""},
		{"sysfs", "/sys", "sysfs", 0, ""},
		{"devtmpfs", "/dev", "devtmpfs", 0, ""},
	} {
		if err := m.do(); err != nil {
			return err
		}
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	if strings.Contains(string(cmdline), guest.ProbeArg) {
		fmt.Println(guest.ProbeAnswer)
		return nil // and power off
	}
	// The directory lists the modules in the order of their dependencies.
	modules, err := os.ReadDir("/modules")
	if err != nil {
		return err
	}
	for _, m := range modules {
		if err := insertModule("/modules/" + m.Name()); err != nil {
			return err
		}
	}
	if err := waitFor("/dev/vda", 10*time.Second); err != nil {
		return err
	}
	for _, m := range []mount{
		{"/dev/vda", "/root", "ext4", unix.MS_NOATIME, "noinit_itable"},
		{"run", "/root/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
	} {
		if err := m.do(); err != nil {
			return err
		}
	}
	program, err := os.ReadFile("/init")
	if err != nil {
		return err
	}
	if err := os.WriteFile("/root"+self, program, 0o755); err != nil {
		return err
	}
	for _, d := range []string{"/proc", "/sys", "/dev"} {
		if err := unix.Mount(d, "/root"+d, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("moving %s: %w", d, err)
		}
	}
	// runc's pivot_root does not work from the RAM disk's root, so it is replaced.
	if err := unix.Chdir("/root"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("switching root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return unix.Exec(self, []string{self, "init"}, environment)
}

var environment = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TERM=linux"}

func insertModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return fmt.Errorf("module %s: %w", path, err)
	}
	return nil
}

func waitFor(path string, limit time.Duration) error {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s did not appear within %v", path, limit)
}

type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil && err != unix.EBUSY {
		return fmt.Errorf("mounting %s: %w", m.target, err)
	}
	return nil
}
