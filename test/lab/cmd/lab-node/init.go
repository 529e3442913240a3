// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
)

// initProcess makes a node of the root file system and then reaps orphans.
// Containers' shims and whatever daemons leave behind become its children; the
// agent's own children are not, so the agent can wait for them itself.
func initProcess() error {
	cfg, err := prepareNode()
	if err != nil {
		return err
	}
	fmt.Printf("lab: %s is up\n", cfg.Name)
	for {
		agent := exec.Command(self, "agent")
		agent.Env = environment
		agent.Stdout, agent.Stderr = os.Stdout, os.Stderr
		if err := agent.Start(); err != nil {
			return fmt.Errorf("starting the agent: %w", err)
		}
		for {
			pid, err := unix.Wait4(-1, nil, 0, nil)
			if err != nil && err != unix.EINTR || pid == agent.Process.Pid {
				break
			}
		}
	}
}

func prepareNode() (*guest.Config, error) {
	const p9 = "trans=virtio,version=9p2000.L,msize=512000"
	for _, m := range []mount{
		{"devpts", "/dev/pts", "devpts", 0, "ptmxmode=666"},
		{"shm", "/dev/shm", "tmpfs", 0, ""},
		{"mqueue", "/dev/mqueue", "mqueue", 0, ""},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", 0, ""},
		{"bpf", "/sys/fs/bpf", "bpf", 0, ""},
		{"tmp", "/tmp", "tmpfs", 0, "mode=1777"},
		{guest.ConfigTag, guest.ConfigDir, "9p", 0, p9},
		// The cache is checked against the file's version when it is opened, so a
		// program that the host replaced is never run from stale pages.
		{guest.ShareTag, guest.ShareDir, "9p", unix.MS_RDONLY, p9 + ",cache=readahead"},
	} {
		if err := m.do(); err != nil {
			return nil, err
		}
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return nil, fmt.Errorf("sharing mounts: %w", err)
	}
	for link, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, link); err != nil && !os.IsExist(err) {
			return nil, err
		}
	}
	cfg, err := guest.ReadConfig(filepath.Join(guest.ConfigDir, "node.json"))
	if err != nil {
		return nil, err
	}
	if err := unix.Sethostname([]byte(cfg.Name)); err != nil {
		return nil, err
	}
	for _, d := range []string{"/run/netns", "/run/lock", filepath.Join(guest.ConfigDir, "log")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	if err := loadModules(); err != nil {
		return nil, err
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return nil, err
	}
	if err := setupNetwork(cfg); err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	return cfg, placeFiles(cfg)
}

func loadModules() error {
	data, err := os.ReadFile(guest.ModulesFile)
	if err != nil {
		return err
	}
	cmd := exec.Command("/sbin/modprobe", append([]string{"--all"}, strings.Fields(string(data))...)...)
	cmd.Env = environment
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("loading modules: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// setupNetwork names the NICs by their MAC address and brings them up, the PF
// too: VFs that are made while it is down do not work.
func setupNetwork(cfg *guest.Config) error {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := handle.LinkSetUp(lo); err != nil {
		return fmt.Errorf("lo up: %w", err)
	}
	mgmt, err := nameLink(handle, cfg.ManagementMAC, "mgmt0")
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(cfg.Address)
	if err != nil {
		return err
	}
	if err := handle.AddrAdd(mgmt, addr); err != nil {
		return fmt.Errorf("address %s: %w", cfg.Address, err)
	}
	if err := handle.RouteAdd(&netlink.Route{LinkIndex: mgmt.Attrs().Index, Gw: net.ParseIP(cfg.Gateway)}); err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	for mac, name := range cfg.Uplinks {
		if _, err := nameLink(handle, mac, name); err != nil {
			return err
		}
	}
	return nil
}

// nameLink names the link with the MAC address and brings it up.
func nameLink(handle *netlink.Handle, mac, name string) (netlink.Link, error) {
	links, err := handle.LinkList()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if l.Attrs().HardwareAddr.String() != mac {
			continue
		}
		if l.Attrs().Name != name {
			if err := handle.LinkSetName(l, name); err != nil {
				return nil, fmt.Errorf("naming %s %s: %w", l.Attrs().Name, name, err)
			}
		}
		if err := handle.LinkSetUp(l); err != nil {
			return nil, fmt.Errorf("%s up: %w", name, err)
		}
		return l, nil
	}
	return nil, fmt.Errorf("no link has the MAC address %s of %s", mac, name)
}

func placeFiles(cfg *guest.Config) error {
	for from, to := range cfg.Files {
		if _, err := os.Stat(to); err == nil {
			continue // kept over a reboot, perhaps changed by a test
		}
		data, err := os.ReadFile(filepath.Join(guest.ConfigDir, from))
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(to, data, 0o600); err != nil {
			return err
		}
	}
	return nil
}
