// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

// retryInterval is the least time between two tries to make VFs that the kernel refused to make.
const retryInterval = 30 * time.Second

// provisioner makes VFs on the configured PFs that have none. It never changes a count that is not zero: that is only
// possible by removing all VFs of the PF, also those in use.
type provisioner struct {
	log    *slog.Logger
	sysfs  sysfs
	kernel kernel
	ifaces []v2alpha1.SRIOVDeviceConfig
	// write writes a sysfs attribute.
	write func(path, value string) error
	// failed has the PFs on which the kernel refused to make VFs.
	failed map[string]failure
}

type failure struct {
	retryAt time.Time
	message string
}

// provision brings every PF to its count of VFs where that is possible, and says what is not. A
// problem of one PF does not stop the work on the others.
func (p *provisioner) provision() []types.Problem {
	var problems []types.Problem
	for i, iface := range p.ifaces {
		field, message := p.provisionPF(iface.IfName, int(iface.VfCount))
		if message != "" {
			problems = append(problems, types.Problem{Field: fmt.Sprintf("sriov.ifaces[%d].%s", i, field), Message: message})
		}
	}
	return problems
}

// provisionPF returns the configuration field that cannot be met, and why.
func (p *provisioner) provisionPF(name string, want int) (field, message string) {
	if err := nic.ValidateName(name); err != nil {
		return "ifName", err.Error()
	}
	if want < 0 {
		return "vfCount", fmt.Sprintf("PF %s: %d VFs are wanted, 0 or more are allowed", name, want)
	}
	dir := filepath.Join(p.sysfs.root, "class/net", name)
	if _, err := os.Stat(dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "ifName", fmt.Sprintf("PF %s: the node has no interface of this name", name)
		}
		return "ifName", fmt.Sprintf("PF %s: %v", name, err)
	}
	limit, err := readInt(filepath.Join(dir, "device/sriov_totalvfs"))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "ifName", fmt.Sprintf("PF %s: the interface is no SR-IOV physical function (it has no device/sriov_totalvfs)", name)
		}
		return "ifName", fmt.Sprintf("PF %s: read the limit of VFs: %v", name, err)
	}
	have, err := readInt(filepath.Join(dir, "device/sriov_numvfs"))
	if err != nil {
		return "ifName", fmt.Sprintf("PF %s: read the number of VFs: %v", name, err)
	}
	switch {
	case want > limit:
		return "vfCount", fmt.Sprintf("PF %s: %d VFs are wanted, it supports at most %d (sriov_totalvfs)", name, want, limit)
	case have == want || want == 0:
		delete(p.failed, name)
		return "", ""
	case have != 0:
		return "vfCount", fmt.Sprintf("PF %s: %d VFs are wanted and it has %d, which are left as they are: "+
			"another number is only possible after all of them are removed", name, want, have)
	}

	if f, ok := p.failed[name]; ok && time.Now().Before(f.retryAt) {
		return "vfCount", f.message
	}
	if err := p.makeVFs(dir, want); err != nil {
		message := fmt.Sprintf("PF %s: making %d VFs (its limit is %d) failed: %v%s", name, want, limit, err, likelyCause(err))
		p.failed[name] = failure{retryAt: time.Now().Add(retryInterval), message: message}
		return "vfCount", message
	}
	delete(p.failed, name)
	p.log.Info("Made SR-IOV VFs", "pf", name, "vfs", want)
	return "", ""
}

// makeVFs puts the PF up first, and leaves it up: with some drivers a VF cannot talk to a PF that is down, and stays
// dead when it was made before.
func (p *provisioner) makeVFs(dir string, count int) error {
	index, err := readInt(filepath.Join(dir, "ifindex"))
	if err != nil {
		return err
	}
	if err := p.kernel.SetUp(index); err != nil {
		return fmt.Errorf("set it up: %w", err)
	}
	return p.write(filepath.Join(dir, "device/sriov_numvfs"), strconv.Itoa(count))
}

func writeAttribute(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// likelyCause tells people what the kernel's errors of sriov_enable (drivers/pci/iov.c) usually mean.
func likelyCause(err error) string {
	switch {
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOSPC):
		return "; the firmware has likely reserved too little address space or too few bus numbers: " +
			"turn SR-IOV on in the firmware's setup, or boot with pci=realloc,assign-busses"
	case errors.Is(err, unix.EBUSY):
		return "; someone else likely changes the PF's VFs"
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES):
		return "; the agent needs sysfs mounted writable"
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
		return "; the PF's driver likely does not support VFs"
	}
	return ""
}
