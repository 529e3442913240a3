// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// nameNICs gives new VFs the names that systemd's udev gives them, PF v NUMBER,
// as it does: after the kernel's notice that the link is there. PFs that are
// plugged in get theirs, by MAC address, and are brought up as at boot.
func nameNICs(pfs map[string]string) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		fmt.Println("lab: device events:", err)
		return
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20)
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		fmt.Println("lab: device events:", err)
		return
	}
	buf := make([]byte, 1<<14)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			if err == unix.EINTR || err == unix.ENOBUFS {
				continue
			}
			fmt.Println("lab: device events:", err)
			return
		}
		if link, ok := addedLink(buf[:n]); ok {
			if err := nameNIC("/sys", link, pfs); err != nil {
				fmt.Printf("lab: naming %s: %v\n", link, err)
			}
		}
	}
}

// addedLink returns the link that a uevent says was added.
func addedLink(event []byte) (string, bool) {
	fields := map[string]string{}
	for pair := range bytes.SplitSeq(event, []byte{0}) {
		if k, v, ok := strings.Cut(string(pair), "="); ok {
			fields[k] = v
		}
	}
	return fields["INTERFACE"], fields["ACTION"] == "add" && fields["SUBSYSTEM"] == "net" && fields["INTERFACE"] != ""
}

func nameNIC(sysfs, link string, pfs map[string]string) error {
	dir := filepath.Join(sysfs, "class", "net", link)
	const byKernel = "1" // NET_NAME_ENUM of linux/netdevice.h
	if assigned, err := os.ReadFile(filepath.Join(dir, "name_assign_type")); err != nil || strings.TrimSpace(string(assigned)) != byKernel {
		return nil // gone, or somebody named it already
	}
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()
	mac, err := os.ReadFile(filepath.Join(dir, "address"))
	if err != nil {
		return err
	}
	if m := strings.TrimSpace(string(mac)); pfs[m] != "" {
		_, err := nameLink(handle, m, pfs[m])
		return err
	}
	name, err := vfName(sysfs, link)
	if err != nil || name == "" {
		return err
	}
	l, err := handle.LinkByName(link)
	if err != nil {
		return err
	}
	return handle.LinkSetName(l, name)
}

// vfName returns the name for a link, or nothing if it is no VF.
func vfName(sysfs, link string) (string, error) {
	vf, err := filepath.EvalSymlinks(filepath.Join(sysfs, "class", "net", link, "device"))
	if err != nil {
		return "", nil
	}
	pf, err := filepath.EvalSymlinks(filepath.Join(vf, "physfn"))
	if err != nil {
		return "", nil
	}
	pfLinks, err := os.ReadDir(filepath.Join(pf, "net"))
	if err != nil || len(pfLinks) == 0 {
		return "", fmt.Errorf("its PF has no link: %v", err)
	}
	virtfns, err := filepath.Glob(filepath.Join(pf, "virtfn*"))
	if err != nil {
		return "", err
	}
	for _, v := range virtfns {
		if target, err := filepath.EvalSymlinks(v); err == nil && target == vf {
			return pfLinks[0].Name() + "v" + strings.TrimPrefix(filepath.Base(v), "virtfn"), nil
		}
	}
	return "", fmt.Errorf("its PF does not know it")
}
