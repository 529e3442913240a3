// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	// retryInterval is the least time between two tries to make VFs that the kernel refused to make.
	retryInterval = 30 * time.Second
	// hangLimit is how long a PF may take until that is reported. With some cards making many VFs takes seconds.
	hangLimit = 5 * time.Second
)

// PFWork is the work on the node's PFs, which outlives the managers that began it: to read or write the number of a PF's VFs
// waits for its driver, and nothing ends that wait. Each PF is worked on by a goroutine of its own.
type PFWork struct {
	// changed gets a value when a PF was found to be otherwise than before.
	changed chan struct{}

	mu  sync.Mutex // guards pfs and, but for what says otherwise, what they point to
	pfs map[string]*pfState
}

// NewPFWork returns the work on the PFs of a node, with nothing done yet.
func NewPFWork() *PFWork {
	return &PFWork{changed: make(chan struct{}, 1), pfs: map[string]*pfState{}}
}

// notify tells the manager at work that a scan may find something new.
func (w *PFWork) notify() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// pfState is what is known of the PF with a configured name.
type pfState struct {
	// since is when the goroutine at work on it began, zero for none, and want is the number of VFs that it is to bring about.
	since time.Time
	want  int
	// found is what the last goroutine, for want VFs, found wrong.
	found finding

	// What follows is the goroutine's.

	// applied is what vfCount was applied to last.
	applied application
	failed  failure
}

// application is a number of VFs, by whom it was applied, and the PF that has been given it. There is another provisioner for
// each configuration. Another ifindex at the same address is another start of the PF's driver, which has forgotten its VFs.
type application struct {
	by    *provisioner
	count int
	addr  string
	index int
}

// finding is a field of a PF's configuration that cannot be met, and why; empty if all is well.
type finding struct{ field, message string }

type failure struct {
	of      application
	retryAt time.Time
	finding
}

// provisioner makes VFs on the configured PFs that have none. It never changes a number that is not zero: that is only
// possible by removing all VFs of the PF, also those in use. A number that it has brought about is the administrator's to
// change: it is applied again when the PF is new, and by the next provisioner, with another configuration or another start of
// the agent.
type provisioner struct {
	log    *slog.Logger
	sysfs  sysfs
	kernel kernel
	ifaces []v2alpha1.SRIOVDeviceConfig
	work   *PFWork
	// write writes a sysfs attribute.
	write func(path, value string) error
}

// provision begins to bring every PF to its number of VFs where that is possible, and says what was found not to be. It waits
// for no PF.
func (p *provisioner) provision(ctx context.Context) []types.Problem {
	var problems []types.Problem
	for i, iface := range p.ifaces {
		if f := p.begin(ctx, iface.IfName, int(iface.VfCount)); f.message != "" {
			problems = append(problems, types.Problem{Field: fmt.Sprintf("sriov.ifaces[%d].%s", i, f.field), Message: f.message})
		}
	}
	return problems
}

// begin begins the work on a PF, unless it is going on, and returns what is known of the PF.
func (p *provisioner) begin(ctx context.Context, name string, want int) finding {
	p.work.mu.Lock()
	defer p.work.mu.Unlock()
	pf := p.work.pfs[name]
	if pf == nil {
		pf = &pfState{}
		p.work.pfs[name] = pf
	}
	if !pf.since.IsZero() && time.Since(pf.since) >= hangLimit {
		pf.found = finding{"vfCount", fmt.Sprintf("PF %s: its driver has not answered for more than %s and cannot be interrupted; "+
			"see dmesg, only a restart of the node may help; other PFs are served", name, hangLimit)}
		return pf.found
	}
	known := finding{}
	if pf.want == want {
		known = pf.found
	}
	if pf.since.IsZero() {
		pf.since, pf.want = time.Now(), want
		go p.run(ctx, name, pf, want)
	}
	return known
}

// run works on one PF.
func (p *provisioner) run(ctx context.Context, name string, pf *pfState, want int) {
	found := p.provisionPF(ctx, pf, name, want)
	p.work.mu.Lock()
	defer p.work.mu.Unlock()
	if found != pf.found {
		p.work.notify()
	}
	pf.found, pf.since = found, time.Time{}
}

// provisionPF brings the PF to the number of VFs, if it may, and returns what is wrong.
func (p *provisioner) provisionPF(ctx context.Context, pf *pfState, name string, want int) finding {
	if err := nic.ValidateName(name); err != nil {
		return finding{"ifName", err.Error()}
	}
	if want < 0 {
		return finding{"vfCount", fmt.Sprintf("PF %s: %d VFs are wanted, 0 or more are allowed", name, want)}
	}
	dir := filepath.Join(p.sysfs.root, "class/net", name)
	if _, err := os.Stat(dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return finding{"ifName", fmt.Sprintf("PF %s: the node has no interface of this name", name)}
		}
		return finding{"ifName", fmt.Sprintf("PF %s: %v", name, err)}
	}
	limit, err := readInt(filepath.Join(dir, "device/sriov_totalvfs"))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return finding{"ifName", fmt.Sprintf("PF %s: the interface is no SR-IOV physical function (it has no device/sriov_totalvfs)", name)}
		}
		return finding{"ifName", fmt.Sprintf("PF %s: read the limit of VFs: %v", name, err)}
	}
	have, err := readInt(filepath.Join(dir, "device/sriov_numvfs"))
	if err != nil {
		return finding{"ifName", fmt.Sprintf("PF %s: read the number of VFs: %v", name, err)}
	}
	present, err := p.application(dir, want)
	switch {
	case err != nil:
		return finding{"ifName", fmt.Sprintf("PF %s: %v", name, err)}
	case want > limit:
		return finding{"vfCount", fmt.Sprintf("PF %s: %d VFs are wanted, it supports at most %d (sriov_totalvfs)", name, want, limit)}
	case have == want:
		pf.applied, pf.failed = present, failure{}
		return finding{}
	case have != 0:
		return finding{"vfCount", fmt.Sprintf("PF %s: %d VFs are wanted and it has %d, which are left as they are: "+
			"another number is only possible after all of them are removed", name, want, have)}
	case pf.applied == present:
		return finding{"vfCount", fmt.Sprintf("PF %s: %d VFs are wanted and it has 0, since somebody has removed them, which is left as it is: "+
			"they are made when the manager's configuration is changed or the agent is started again", name, want)}
	case ctx.Err() != nil:
		return finding{}
	case pf.failed.of == present && time.Now().Before(pf.failed.retryAt):
		return pf.failed.finding
	}
	if err := p.makeVFs(dir, present.index, want); err != nil {
		pf.failed = failure{present, time.Now().Add(retryInterval), finding{"vfCount",
			fmt.Sprintf("PF %s: making %d VFs (its limit is %d) failed: %v%s", name, want, limit, err, likelyCause(err))}}
		return pf.failed.finding
	}
	pf.applied, pf.failed = present, failure{}
	p.log.Info("Made SR-IOV VFs", "pf", name, "vfs", want)
	p.work.notify()
	return finding{}
}

// application returns what it is to apply a number of VFs to the PF whose interface's directory is given.
func (p *provisioner) application(dir string, count int) (application, error) {
	target, err := os.Readlink(filepath.Join(dir, "device"))
	if err != nil {
		return application{}, err
	}
	index, err := readInt(filepath.Join(dir, "ifindex"))
	return application{by: p, count: count, addr: filepath.Base(target), index: index}, err
}

// makeVFs puts the PF up first, and leaves it up: with some drivers a VF cannot talk to a PF that is down, and stays
// dead when it was made before.
func (p *provisioner) makeVFs(dir string, index, count int) error {
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
