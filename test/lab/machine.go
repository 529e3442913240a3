// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/networkdriver/test/lab/internal/cache"
	"github.com/cilium/networkdriver/test/lab/internal/guest"
	"github.com/cilium/networkdriver/test/lab/internal/proc"
)

// nodeMemory is a guest's RAM in MiB. With 4 GiB the guest has RAM above 4 GiB,
// and the mailbox interrupts of igb's VFs get lost: 2560 is known to work.
const nodeMemory = 2560

// kvmProbeTimeout is how long a guest may take to start with KVM. Where it
// works that is less than a second or two.
const kvmProbeTimeout = 20 * time.Second

// qemu returns the command line of QEMU from its unpacked packages, with its
// own libraries: those of this machine do not matter.
func (a *NodeArtifacts) qemu(args ...string) (command []string, env []string) {
	lib := filepath.Join(a.QEMU, "usr/lib/x86_64-linux-gnu")
	command = []string{
		filepath.Join(lib, "ld-linux-x86-64.so.2"), "--library-path", lib,
		filepath.Join(a.QEMU, "usr/bin/qemu-system-x86_64"),
	}
	for _, d := range []string{"usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"} {
		command = append(command, "-L", filepath.Join(a.QEMU, d))
	}
	return append(command, args...), []string{"QEMU_MODULE_DIR=" + filepath.Join(lib, "qemu")}
}

func (n *Node) startMachine(ctx context.Context) error {
	if n.lab.processes.Alive(n.Name()) {
		return fmt.Errorf("node %s is on", n.Name())
	}
	arts := n.lab.arts.Node
	// Emulation takes a third less time without what a processor has to protect the kernel and without the larger
	// registers, which are saved in every change of processes. Its string instructions are no faster than loops.
	args := []string{"-accel", "tcg", "-cpu", "max,la57=off,smap=off,smep=off,umip=off,pku=off,xsave=off,avx=off,erms=off,fsrm=off"}
	cpus := cmp.Or(n.lab.nodeOptions.CPUs, 1)
	if arts.kvmWorks(ctx) {
		args, cpus = []string{"-accel", "kvm", "-cpu", "host"}, cmp.Or(n.lab.nodeOptions.CPUs, 2)
	}
	args = append(args, "-smp", fmt.Sprint(cpus),
		"-name", n.Name(), "-M", "q35,kernel-irqchip=split", "-m", fmt.Sprint(nodeMemory),
		"-nodefaults", "-display", "none", "-serial", "file:"+n.ConsoleLog(),
		"-kernel", arts.Kernel, "-initrd", arts.Initrd,
		// A timer that is set anew for each wait costs the emulator more than a steady tick. Memory is not zeroed when it is
		// allocated for the kernel itself.
		"-append", "console=ttyS0 quiet panic=-1 intel_iommu=on mitigations=off net.ifnames=0 highres=off nohz=off init_on_alloc=0",
		"-device", "intel-iommu,intremap=on",
		"-netdev", "tap,id=mgmt,ifname="+n.managementTap()+",script=no,downscript=no",
		"-device", "virtio-net-pci,romfile=,netdev=mgmt,mac="+n.managementMAC(),
		"-virtfs", "local,path="+n.guestDir()+",mount_tag="+guest.ConfigTag+",security_model=none,multidevs=remap",
		"-virtfs", "local,path="+n.lab.ShareDir()+",mount_tag="+guest.ShareTag+",security_model=none,readonly=on,multidevs=remap",
		"-drive", "file="+n.diskPath()+",if=virtio,format=raw,cache=unsafe",
		"-device", "virtio-rng-pci",
		"-qmp", "unix:"+n.monitorSocket()+",abstract=on,server=on,wait=off",
	)
	if n.front {
		args = append(args, "-device", "pcie-root-port,id=front,chassis=100,slot=100", "-device", "igb,id=infront,bus=front")
	}
	for _, pf := range n.pfs() {
		args = append(args,
			"-device", fmt.Sprintf("pcie-root-port,id=%s,chassis=%d,slot=%[2]d", pf.port(), pf.number),
			"-netdev", "tap,id="+pf.netdev()+",ifname="+pf.tap+",script=no,downscript=no",
			"-device", pf.nic().String(),
		)
	}
	command, env := arts.qemu(args...)
	p, err := n.lab.spawner.Start(proc.Command{
		Name: n.Name(), Args: command, Env: env, Log: filepath.Join(n.dir(), "qemu.log"),
	})
	if err != nil {
		return err
	}
	n.lab.processes.Set(n.Name(), p)
	return n.lab.save()
}

func (n *Node) stopMachine() error {
	p := n.lab.processes.Get(n.Name())
	if p == nil {
		return nil
	}
	if err := p.Stop(0); err != nil {
		return err
	}
	n.lab.processes.Set(n.Name(), nil)
	n.agent.http.CloseIdleConnections()
	return nil
}

// kvmWorks reports whether a guest boots with KVM: its device may be there
// and guests crash in it. The answer is kept until this machine reboots.
func (a *NodeArtifacts) kvmWorks(ctx context.Context) bool {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	f.Close()
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return false
	}
	answer := cache.Artifact{Name: "kvm", Inputs: []string{string(bootID), a.Kernel, a.QEMU}}
	dir, err := cache.Cache{Dir: a.Cache}.Ensure(ctx, answer, func(ctx context.Context, dir string) error {
		return os.WriteFile(filepath.Join(dir, "answer"), []byte(fmt.Sprint(a.probeKVM(ctx))), 0o644)
	})
	if err != nil {
		return false
	}
	data, err := os.ReadFile(filepath.Join(dir, "answer"))
	return err == nil && string(data) == "true"
}

func (a *NodeArtifacts) probeKVM(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, kvmProbeTimeout)
	defer cancel()
	command, env := a.qemu("-accel", "kvm", "-cpu", "host", "-M", "q35,kernel-irqchip=split", "-m", "512",
		"-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio", "-device", "intel-iommu,intremap=on",
		"-kernel", a.Kernel, "-initrd", a.Initrd, "-append", "console=ttyS0 panic=-1 intel_iommu=on "+guest.ProbeArg)
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), env...)
	out := &watched{text: []byte("KVM internal error"), seen: cancel}
	cmd.Stdout, cmd.Stderr = out, out
	// It ends when this program does, of which the kernel takes the end of the thread that has started it for a sign.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	return err == nil && bytes.Contains(out.out.Bytes(), []byte(guest.ProbeAnswer))
}

// watched collects output, and calls seen when the text is in it. QEMU stays where KVM gives a guest up.
type watched struct {
	out  bytes.Buffer
	text []byte
	seen func()
}

func (w *watched) Write(p []byte) (int, error) {
	n, err := w.out.Write(p)
	if bytes.Contains(w.out.Bytes(), w.text) {
		w.seen()
	}
	return n, err
}

// forget takes a node out of the lab's list.
func (l *Lab) forget(gone *Node) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var left []*Node
	for _, n := range l.nodes {
		if n != gone {
			left = append(left, n)
		}
	}
	l.nodes = left
}

// tail returns the end of a file, for messages.
func tail(path string) string {
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return "(none)"
	}
	if err != nil {
		return err.Error()
	}
	text := strings.TrimSpace(string(data))
	return text[max(0, len(text)-2000):]
}
