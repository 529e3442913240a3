// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/test/lab"
	"github.com/cilium/networkdriver/test/nodestate"
)

const numVFs = "/sys/class/net/" + lab.Uplink + "/device/sriov_numvfs"

// stays are the pods that stay.
var stays = []string{"stays-vf", "stays-dummy"}

// anew ends all pods, those that stay too, wants the node as it was without any, and begins anew: for faults that change
// what the pods that stay have. Addresses do not count.
func (b *bench) anew(ctx context.Context, names []string) error {
	if err := b.delete(ctx, 1, append(names, stays...)...); err != nil {
		return err
	}
	err := b.eventually(ctx, "node without pods", func(ctx context.Context) string {
		now, err := b.reader.Read(ctx)
		if err != nil {
			return err.Error()
		}
		return nodestate.Difference(b.idle.WithoutAddresses(), now.WithoutAddresses())
	})
	if b.took == 0 {
		b.took = time.Since(b.faultAt)
	}
	if err != nil {
		return err
	}
	return b.begin(ctx)
}

// remaking does to running pods what makes their devices anew, the pods' that stay too, and begins anew.
func remaking(do func(ctx context.Context, b *bench, names []string) error) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		b.fault()
		if err := do(ctx, b, names); err != nil {
			return err
		}
		if err := b.running(ctx, append(names, stays...)...); err != nil {
			return err
		}
		b.recovered()
		return b.anew(ctx, names)
	}
}

// rebound unbinds the driver from the VF of a pod and binds it again: the VF has another link then, which comes into the pod.
var rebound = remaking(func(ctx context.Context, b *bench, names []string) error {
	addr, err := b.addressOf(ctx, names[0])
	if err != nil {
		return err
	}
	if _, err := b.node.Run(ctx, fmt.Sprintf("echo %s > /sys/bus/pci/devices/%s/driver/unbind", addr, addr)); err != nil {
		return err
	}
	time.Sleep(3 * time.Second)
	_, err = b.node.Run(ctx, fmt.Sprintf("echo %s > /sys/bus/pci/drivers_probe", addr))
	return err
})

// addressOf returns the PCI address of the pod's VF.
func (b *bench) addressOf(ctx context.Context, name string) (string, error) {
	pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	rows, err := b.reader.Table(ctx, "networkdriver-dra-allocations")
	if err != nil {
		return "", err
	}
	for _, row := range rows {
		if parts := strings.Split(row.Device, "-"); row.Pod == string(pod.UID) && len(parts) == 4 {
			return strings.Join(parts[:3], ":") + "." + parts[3], nil
		}
	}
	return "", fmt.Errorf("pod %s has no VF: %+v", name, rows)
}

// vfsAnew removes all VFs under pods and makes them again.
func vfsAnew(away bool) func(context.Context, *bench, int) error {
	return remaking(func(ctx context.Context, b *bench, _ []string) error {
		if away {
			if err := b.killAgent(ctx); err != nil {
				return err
			}
		}
		if _, err := b.node.Run(ctx, "echo 0 > "+numVFs); err != nil {
			return err
		}
		time.Sleep(3 * time.Second)
		_, err := b.node.Run(ctx, fmt.Sprintf("echo %d > %s", vfCount, numVFs))
		if away {
			return errors.Join(err, b.startAgent(ctx))
		}
		return err
	})
}

// pfDown has the PF down for a while: before pods start, while they do, or under them.
func pfDown(when string) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		set := func(state string) error {
			_, err := b.node.Run(ctx, fmt.Sprintf("ip link set %s %s", lab.Uplink, state))
			return err
		}
		var names []string
		err := error(nil)
		switch when {
		case "before":
			if err = set("down"); err == nil {
				time.Sleep(3 * time.Second)
				names, err = b.createAll(ctx, twoPods...)
			}
		case "between":
			if names, err = b.createAll(ctx, twoPods...); err == nil {
				time.Sleep(700 * time.Millisecond)
				err = set("down")
			}
		default:
			if names, err = b.started(ctx, twoPods...); err == nil {
				err = set("down")
			}
		}
		if err != nil {
			return errors.Join(err, set("up"))
		}
		time.Sleep(5 * time.Second)
		b.fault()
		if err := set("up"); err != nil {
			return err
		}
		if err := b.running(ctx, names...); err != nil {
			return err
		}
		b.recovered()
		return b.delete(ctx, 1, names...)
	}
}

// pfRenamed gives the PF another name under pods, of which one ends and one starts meanwhile, and then its own again.
func pfRenamed(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	b.fault()
	rename := func(from, to string) error {
		_, err := b.node.Run(ctx, fmt.Sprintf("ip link set %[1]s down; ip link set %[1]s name %[2]s && ip link set %[2]s up", from, to))
		return err
	}
	if err := rename(lab.Uplink, "other0"); err != nil {
		return err
	}
	err = b.delete(ctx, 1, names[0])
	time.Sleep(3 * time.Second)
	if err := errors.Join(err, rename("other0", lab.Uplink)); err != nil {
		return err
	}
	more, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "plain"})
	if err != nil {
		return err
	}
	b.recovered()
	return b.delete(ctx, 1, append(more, names[1])...)
}

// pfElsewhere moves the PF into another network namespace under pods, of which one ends meanwhile, and back.
func pfElsewhere(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	b.fault()
	const elsewhere = "faults-elsewhere"
	if _, err := b.node.Run(ctx, fmt.Sprintf("ip netns add %[1]s && ip link set %[2]s netns %[1]s", elsewhere, lab.Uplink)); err != nil {
		return err
	}
	// The VF cannot be given back without its PF, which the pod's end does not wait for.
	err = b.deleteNow(ctx, 1, names[0])
	time.Sleep(5 * time.Second)
	_, backErr := b.node.Run(ctx, fmt.Sprintf("ip -n %[1]s link set %[2]s netns 1 && ip netns del %[1]s && ip link set %[2]s up", elsewhere, lab.Uplink))
	if err := errors.Join(err, backErr); err != nil {
		return err
	}
	if err := b.gone(ctx, names[0]); err != nil {
		return err
	}
	more, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "plain"})
	if err != nil {
		return err
	}
	if err := b.running(ctx, names[1]); err != nil {
		return err
	}
	b.recovered()
	return b.delete(ctx, 1, append(more, names[1])...)
}

// unplugged takes the NIC out of the node under pods, and puts it back.
var unplugged = remaking(func(ctx context.Context, b *bench, _ []string) error {
	if err := b.node.Unplug(ctx, lab.Uplink); err != nil {
		return err
	}
	time.Sleep(3 * time.Second)
	if err := b.node.Plug(ctx, lab.Uplink); err != nil {
		return err
	}
	return b.eventually(ctx, "PF", func(ctx context.Context) string {
		_, err := b.node.Run(ctx, "ip link set "+lab.Uplink+" up")
		if err != nil {
			return err.Error()
		}
		return ""
	})
})

// runFull leaves no room in /run while pods end and others start. Those that end give back what they have.
func runFull(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	b.fault()
	// The driver's own folder is full: with all of /run it would be the runtime that fails first.
	const dir = "/run/cilium/networkdriver"
	if _, err := b.node.Run(ctx, fmt.Sprintf("cp -a %[1]s /run/faults-copy", dir)); err != nil {
		return err
	}
	if err := b.killAgent(ctx); err != nil {
		return err
	}
	if _, err := b.node.Run(ctx, fmt.Sprintf(`mount -t tmpfs -o size=128k faults %[1]s && cp -a /run/faults-copy/. %[1]s/ &&
{ dd if=/dev/zero of=%[1]s/filler bs=1k 2>/dev/null; true; }`, dir)); err != nil {
		return err
	}
	if err := b.StartAgent(ctx, b.node); err != nil {
		return err
	}
	err = b.delete(ctx, 1, names...)
	if err == nil { // what was given back has left room
		_, err = b.node.Run(ctx, fmt.Sprintf("dd if=/dev/zero of=%s/filler2 bs=1k 2>/dev/null; true", dir))
	}
	var more []string
	if err == nil {
		more, err = b.createAll(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "plain"})
	}
	if err == nil {
		err = b.eventually(ctx, "event", func(ctx context.Context) string {
			pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, more[0], metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			events := strings.Join(b.events(ctx, *pod), " | ")
			if !strings.Contains(events, "make sure that there is space") {
				return "says nothing of space: " + events
			}
			b.notes = append(b.notes, "a pod's event says that there is no space")
			return ""
		})
	}
	if err := errors.Join(err, b.killAgent(ctx)); err != nil {
		return err
	}
	if _, err := b.node.Run(ctx, fmt.Sprintf("rm -f %[1]s/filler*; rm -rf /run/faults-copy && cp -a %[1]s /run/faults-copy && umount %[1]s && rm -rf %[1]s && mv /run/faults-copy %[1]s", dir)); err != nil {
		return err
	}
	if err := b.startAgent(ctx); err != nil {
		return err
	}
	b.recovered()
	if err := b.running(ctx, more...); err != nil {
		return err
	}
	return b.delete(ctx, 1, more...)
}

// rebooted boots the node under pods: they come up again with their devices.
func rebooted(boot func(*lab.Node, context.Context) error) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		names, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN, shape: "plain"}, kind{template: "vf", vlan: firstVLAN + 1, shape: "sidecar"})
		if err != nil {
			return err
		}
		b.fault()
		if err := boot(b.node, ctx); err != nil {
			return err
		}
		if _, err := b.node.Run(ctx, "mkdir -p "+seenDir+" "+crashDir); err != nil {
			return err
		}
		if err := b.StartAgent(ctx, b.node); err != nil {
			return err
		}
		all := slices.Concat(names, stays)
		if err := b.eventually(ctx, "containers after the boot", func(ctx context.Context) string {
			for _, name := range all {
				pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
				if err != nil {
					return err.Error()
				}
				if s := pod.Status.ContainerStatuses; len(s) == 0 || s[0].RestartCount == 0 {
					return name + " has not been started again: " + strings.Join(b.events(ctx, *pod), " | ")
				}
			}
			return ""
		}); err != nil {
			return err
		}
		if err := b.running(ctx, all...); err != nil {
			return err
		}
		b.recovered()
		return b.anew(ctx, names)
	}
}

// otherVFs makes the VFs of the NIC that is in front of the PF, and prints its link.
const otherVFs = `for d in /sys/bus/pci/drivers/igb/0000:*; do n=$(ls $d/net); [ "$n" = ` + lab.Uplink + ` ] || {
ip link set $n up; echo 7 > $d/sriov_numvfs; echo $n; }; done`

// pciShifted boots the node with another NIC in front of the PF, which has the PCI addresses then that the VFs of the pods had. No
// pod may get one of that one's VFs: those that were allotted such a device wait until they are deleted.
func pciShifted(ctx context.Context, b *bench, _ int) error {
	names, err := b.started(ctx, twoPods...)
	if err != nil {
		return err
	}
	lost := append([]string{stays[0]}, names...) // the dummy is as before
	boot := func(front bool) error {
		if err := b.node.PowerOff(); err != nil {
			return err
		}
		b.node.InFront(front)
		if err := b.node.PowerOn(ctx); err != nil {
			return err
		}
		_, err := b.node.Run(ctx, "mkdir -p "+seenDir+" "+crashDir)
		return err
	}
	b.fault()
	if err := boot(true); err != nil {
		return err
	}
	other, err := b.node.Run(ctx, otherVFs)
	if err != nil {
		return err
	}
	if err := b.StartAgent(ctx, b.node); err != nil {
		return err
	}
	err = b.eventually(ctx, "events", func(ctx context.Context) string {
		for _, name := range lost {
			pod, err := b.Client.CoreV1().Pods(b.ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if events := strings.Join(b.events(ctx, *pod), " | "); !strings.Contains(events, "is gone: the node has no such device") &&
				!strings.Contains(events, "any more, which it was allotted from") { // where it was, another NIC's VF is, which no pool takes
				return name + " is not told that its device is gone: " + events
			}
		}
		return ""
	})
	if err != nil {
		return err
	}
	more, err := b.started(ctx, kind{template: "vf", vlan: firstVLAN + 2, shape: "plain"})
	if err != nil {
		return err
	}
	b.recovered()
	table, err := b.node.Run(ctx, "ip link show "+strings.TrimSpace(other))
	if err != nil {
		return err
	}
	if strings.Count(table, "vf ") != 7 || strings.Contains(table, "vlan") {
		return fmt.Errorf("a NIC that is not the driver's was changed: %s", table)
	}
	if err := b.delete(ctx, 1, slices.Concat(names, more, stays)...); err != nil {
		return err
	}
	if err := boot(false); err != nil {
		return err
	}
	if err := b.StartAgent(ctx, b.node); err != nil {
		return err
	}
	return b.anew(ctx, nil)
}
