// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package sriov

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/hostnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/rescan"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// running is a manager whose Run has been started inside a synctest bubble.
type running struct {
	// mu guards snapshots.
	mu        sync.Mutex
	snapshots []types.Snapshot
}

func (r *running) published() []types.Snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.snapshots)
}

// kinds counts the devices and the skipped devices of every snapshot.
func (r *running) kinds() []string {
	var kinds []string
	for _, s := range r.published() {
		kinds = append(kinds, fmt.Sprintf("%d+%d", len(s.Devices), len(s.Skipped)))
	}
	return kinds
}

// run starts the manager and returns after its first publication, if there is one.
func run(t *testing.T, m *Manager) *running {
	r := &running{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- m.Run(ctx, func(s types.Snapshot) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.snapshots = append(r.snapshots, s)
		})
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	synctest.Wait()
	return r
}

// after lets time pass.
func after(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestRunPublishesChangesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		node.kernel.events = make(chan error)
		r := run(t, node.manager(Params{}))
		require.Equal(t, []string{"2+0"}, r.kinds(), "at once")
		after(5 * rescan.PollInterval)
		require.Equal(t, []string{"2+0"}, r.kinds(), "nothing changed")

		node.remove(filepath.Join(bus, "0000:03:10.0", "driver"))
		after(rescan.PollInterval)
		require.Equal(t, []string{"2+0", "1+1"}, r.kinds(), "found without an event")
		node.bind("0000:03:10.0", "igbvf")
		after(rescan.PollInterval)
		require.Equal(t, []string{"2+0", "1+1", "2+0"}, r.kinds(), "it returns by itself")
	})
}

// A burst of link events is one scan, when it is over; and events that never end do not put it off without end.
func TestRunWaitsForQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		node.kernel.events = make(chan error)
		r := run(t, node.manager(Params{}))
		for range 3 {
			node.rename(3, "transient0")
			node.kernel.events <- nil
			after(rescan.QuietPeriod / 2)
			node.rename(3, "settled0")
			node.kernel.events <- nil
			after(rescan.QuietPeriod / 2)
		}
		require.Len(t, r.published(), 1, "it is not quiet yet")
		after(rescan.QuietPeriod)
		require.Len(t, r.published(), 2)
		require.Equal(t, "settled0", r.published()[1].Devices[0].KernelIfName())

		node.rename(3, "again0")
		for range rescan.MaxSettle / (rescan.QuietPeriod / 2) {
			node.kernel.events <- nil
			after(rescan.QuietPeriod / 2)
		}
		require.Len(t, r.published(), 3, "scanned although it never was quiet")
	})
}

func TestRunSubscribesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		node.kernel.events = make(chan error)
		r := run(t, node.manager(Params{}))
		node.rename(3, "missed0")
		node.kernel.events <- unix.ENOBUFS
		after(rescan.ResubscribeDelay + rescan.QuietPeriod)
		require.Len(t, r.published(), 2, "what was missed meanwhile is looked for")
		node.rename(3, "seen0")
		node.kernel.events <- nil
		after(rescan.QuietPeriod)
		require.Len(t, r.published(), 3)
	})
}

func TestRunKeepsLastGoodInventory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		var log bytes.Buffer
		node.kernel.scanErr = errors.New("boom")
		r := run(t, node.manager(Params{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
		require.Empty(t, r.published(), "nothing is known yet")
		node.kernel.with(func() { node.kernel.scanErr = nil })
		after(rescan.PollInterval)
		require.Equal(t, []string{"2+0"}, r.kinds())
		node.kernel.with(func() { node.kernel.scanErr = errors.New("boom") })
		after(rescan.PollInterval)
		require.Equal(t, []string{"2+0"}, r.kinds())
		require.Contains(t, log.String(), "boom")
	})
}

// A scan that fails hides neither a problem that is new nor that one is solved.
func TestRunPublishesProblemsWithoutScan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		numVFs := filepath.Join(bus, pfAddr, "sriov_numvfs")
		node.write(numVFs, "2")
		r := run(t, node.manager(Params{Config: sriovConfig(v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 2})}))
		node.kernel.with(func() { node.kernel.scanErr = errors.New("boom") })
		node.write(numVFs, "4")
		after(rescan.PollInterval + rescan.QuietPeriod)
		require.Equal(t, []string{"2+0", "2+0"}, r.kinds(), "the devices stay")
		require.Empty(t, r.published()[0].Problems)
		require.Len(t, r.published()[1].Problems, 1)
		require.Contains(t, r.published()[1].Problems[0].Message, "2 VFs are wanted and it has 4")
		after(3 * rescan.PollInterval)
		require.Len(t, r.published(), 2, "it is published once")
		node.write(numVFs, "2")
		after(rescan.PollInterval + rescan.QuietPeriod)
		require.Len(t, r.published(), 3)
		require.Empty(t, r.published()[2].Problems)
	})
}

// An address that the cluster knows the node by takes the VF that has it out of service as soon as it is known.
func TestRunFollowsNodeAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		addr := netip.MustParseAddr("192.0.2.1")
		node.kernel.addresses = []hostnet.Address{{Index: 3, Addr: addr}}
		var known atomic.Bool
		changed := make(chan struct{})
		r := run(t, node.manager(Params{NodeIPs: func() ([]netip.Addr, <-chan struct{}) {
			if known.Load() {
				return []netip.Addr{addr}, nil
			}
			return nil, changed
		}}))
		require.Equal(t, []string{"2+0"}, r.kinds())
		offered := r.published()[0].Devices[0]

		known.Store(true)
		_, err := offered.Setup(t.Context(), types.DeviceConfig{})
		require.ErrorContains(t, err, "it has the node's address 192.0.2.1", "also before the next scan")
		close(changed)
		after(rescan.QuietPeriod)
		require.Equal(t, []string{"2+0", "1+1"}, r.kinds())
		require.Contains(t, r.published()[1].Skipped[0].Reason, "it has the node's address 192.0.2.1")
	})
}

func TestRunWarnsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newNode(t)
		node.vf(pfAddr, 2, "0000:03:10.4")
		var log bytes.Buffer
		run(t, node.manager(Params{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
		node.rename(3, "other0")
		after(3 * rescan.PollInterval)
		require.Equal(t, 1, strings.Count(log.String(), "device=0000-03-10-4"))
	})
}

// attach lets the tree do what the kernel does when a PF's count of VFs is written.
func (t *tree) attach(m *Manager) (writes *[]string) {
	writes = &[]string{}
	m.provisioner.write = func(path, value string) error {
		*writes = append(*writes, strings.TrimPrefix(path, t.root)+"="+value)
		if err := writeAttribute(path, value); err != nil {
			return err
		}
		var count int
		fmt.Sscan(value, &count)
		for i := range count {
			t.kernelVF(pfAddr, i, fmt.Sprintf("0000:03:10.%d", i), fmt.Sprintf("ens1f0v%d", i))
		}
		return nil
	}
	return writes
}

func sriovConfig(ifaces ...v2alpha1.SRIOVDeviceConfig) *v2alpha1.SRIOVDeviceManagerConfig {
	return &v2alpha1.SRIOVDeviceManagerConfig{Enabled: true, Ifaces: ifaces}
}

// provision does the work on the PFs and returns what is wrong then.
func provision(t *testing.T, m *Manager) []types.Problem {
	t.Helper()
	m.provisioner.provision(t.Context())
	m.provisioner.await(t)
	problems := m.provisioner.provision(t.Context())
	m.provisioner.await(t)
	return problems
}

func TestProvision(t *testing.T) {
	node := newTree(t)
	pf := node.pf(pfAddr, pfName, 7)
	m := node.manager(Params{Config: sriovConfig(v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 4})})
	writes := node.attach(m)
	require.Empty(t, provision(t, m))
	require.Equal(t, []int{pf}, node.kernel.up, "the PF is up before VFs are made")
	require.Equal(t, []string{"/class/net/ens1f0/device/sriov_numvfs=4"}, *writes)
	require.True(t, strings.HasPrefix(node.read(filepath.Join(bus, pfAddr, "sriov_numvfs")), "4"))
	devices, _ := node.scan(m)
	require.Len(t, devices, 4)

	node.write(filepath.Join(bus, pfAddr, "sriov_numvfs"), "4")
	require.Empty(t, provision(t, m))
	require.Len(t, *writes, 1, "they are made once")
}

func TestProvisionProblems(t *testing.T) {
	for name, tc := range map[string]struct {
		have        string
		iface       v2alpha1.SRIOVDeviceConfig
		field, want string
	}{
		"fewer than wanted":   {"2", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 6}, "vfCount", "PF ens1f0: 6 VFs are wanted and it has 2, which are left"},
		"more than wanted":    {"4", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 1}, "vfCount", "PF ens1f0: 1 VFs are wanted and it has 4"},
		"above the limit":     {"0", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 200}, "vfCount", "PF ens1f0: 200 VFs are wanted, it supports at most 7"},
		"negative":            {"0", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: -1}, "vfCount", "PF ens1f0: -1 VFs"},
		"unknown PF":          {"0", v2alpha1.SRIOVDeviceConfig{IfName: "nosuch0", VfCount: 4}, "ifName", "PF nosuch0: the node has no interface of this name"},
		"no PF":               {"0", v2alpha1.SRIOVDeviceConfig{IfName: "plain0", VfCount: 4}, "ifName", "PF plain0: the interface is no SR-IOV physical function"},
		"path":                {"0", v2alpha1.SRIOVDeviceConfig{IfName: "../net/ens1f0", VfCount: 4}, "ifName", `"../net/ens1f0" contains '/', which an interface name must not`},
		"none wanted, some":   {"4", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 0}, "vfCount", "PF ens1f0: 0 VFs are wanted and it has 4, which are left"},
		"none wanted, none":   {"0", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 0}, "", ""},
		"as many as wanted":   {"4", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 4}, "", ""},
		"unreadable number":   {"many", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 4}, "ifName", "PF ens1f0: read the number of VFs"},
		"sysfs does not take": {"0", v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 4}, "vfCount", "PF ens1f0: making 4 VFs (its limit is 7) failed: cannot allocate memory; the firmware"},
	} {
		t.Run(name, func(t *testing.T) {
			node := newTree(t)
			node.pf(pfAddr, pfName, 7)
			node.device("0000:04:00.0", "0x020000", "0x10c9")
			node.netdev("0000:04:00.0", "plain0")
			node.pf("0000:05:00.0", "ens2f0", 7)
			numVFs := filepath.Join(bus, pfAddr, "sriov_numvfs")
			node.write(numVFs, tc.have)
			m := node.manager(Params{Config: sriovConfig(tc.iface, v2alpha1.SRIOVDeviceConfig{IfName: "ens2f0", VfCount: 3})})
			var written []string
			m.provisioner.write = func(path, value string) error {
				if strings.Contains(path, pfName) {
					return unix.ENOMEM
				}
				written = append(written, value)
				return writeAttribute(path, value)
			}
			problems := provision(t, m)
			require.Equal(t, []string{"3"}, written, "the other PF is brought to its count")
			require.Equal(t, tc.have, node.read(numVFs), "an existing count is never changed")
			if tc.want == "" {
				require.Empty(t, problems)
				return
			}
			require.Len(t, problems, 1)
			require.Equal(t, "sriov.ifaces[0]."+tc.field, problems[0].Field)
			require.Contains(t, problems[0].Message, tc.want)
		})
	}
}

// What the kernel refuses is tried again, not at every scan, and the problem stays visible until it works.
func TestProvisionRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := newTree(t)
		node.pf(pfAddr, pfName, 7)
		node.kernel.setUpErr = unix.ENETDOWN
		m := node.manager(Params{Config: sriovConfig(v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: 4})})
		node.attach(m)
		r := run(t, m)
		require.Equal(t, []string{"0+0"}, r.kinds(), "what is there is not kept waiting")
		after(rescan.QuietPeriod)
		require.Len(t, r.published(), 2)
		require.Len(t, r.published()[1].Problems, 1)
		require.Contains(t, r.published()[1].Problems[0].Message, "set it up: network is down")
		after(retryInterval - time.Second)
		require.Len(t, node.kernel.up, 1)
		require.Len(t, r.published(), 2)
		node.kernel.with(func() { node.kernel.setUpErr = nil })
		after(2 * rescan.PollInterval)
		require.Len(t, node.kernel.up, 2)
		require.Len(t, r.published(), 3)
		require.Empty(t, r.published()[2].Problems)
		require.Len(t, r.published()[2].Devices, 4)
	})
}

// An administrator's number stays: vfCount is applied at start, when the configuration changes, and when the PF is new.
func TestProvisionAgainstAnAdministrator(t *testing.T) {
	node := newTree(t)
	index := node.pf(pfAddr, pfName, 7)
	numVFs := filepath.Join(bus, pfAddr, "sriov_numvfs")
	work := NewPFWork()
	manager := func(count int32) (*Manager, *[]string) {
		m := node.manager(Params{Work: work, Config: sriovConfig(v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: count})})
		writes := &[]string{}
		m.provisioner.write = func(path, value string) error {
			*writes = append(*writes, value)
			return os.WriteFile(path, []byte(value), 0o600)
		}
		return m, writes
	}
	m, writes := manager(4)
	require.Empty(t, provision(t, m))
	require.Equal(t, []string{"4"}, *writes)

	node.write(numVFs, "0")
	for range 2 {
		problems := provision(t, m)
		require.Len(t, problems, 1)
		require.Contains(t, problems[0].Message, "PF ens1f0: 4 VFs are wanted and it has 0, since somebody has removed them, which is left as it is")
	}
	require.Len(t, *writes, 1)

	node.write(numVFs, "2")
	m, writes = manager(6)
	require.Contains(t, provision(t, m)[0].Message, "6 VFs are wanted and it has 2")
	node.write(numVFs, "0")
	require.Empty(t, provision(t, m), "the new number is owed until it could be applied")
	require.Equal(t, []string{"6"}, *writes)

	node.hideNetdev(pfAddr, pfName)
	node.kernel.with(func() { delete(node.kernel.links, index) })
	node.netdev(pfAddr, pfName)
	node.write(numVFs, "0")
	require.Empty(t, provision(t, m), "the PF's driver was started anew")
	require.Equal(t, []string{"6", "6"}, *writes)

	node.write(numVFs, "0")
	require.Len(t, provision(t, m), 1)
	m, writes = manager(6)
	require.Empty(t, provision(t, m), "another configuration, or another start of the agent")
	require.Equal(t, []string{"6"}, *writes)
}

// A PF whose driver does not answer holds nothing up but itself, also not its manager's end, and is named.
func TestHungPF(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const other, otherAddr = "ens2f0", "0000:05:00.0"
		node := newNode(t)
		node.pf(otherAddr, other, 7)
		node.kernel.events = make(chan error)
		hung, work := make(chan struct{}), NewPFWork()
		var mu sync.Mutex // guards writes
		var writes []string
		start := func(count int32) (r *running, stop func()) {
			m := node.manager(Params{Work: work, Config: sriovConfig(
				v2alpha1.SRIOVDeviceConfig{IfName: pfName, VfCount: count}, v2alpha1.SRIOVDeviceConfig{IfName: other, VfCount: count})})
			m.provisioner.write = func(path, value string) error {
				mu.Lock()
				writes = append(writes, filepath.Base(filepath.Dir(filepath.Dir(path)))+"="+value)
				mu.Unlock()
				if strings.Contains(path, pfName) {
					<-hung
				}
				return os.WriteFile(path, []byte(value), 0o600)
			}
			r = &running{}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() {
				done <- m.Run(ctx, func(s types.Snapshot) {
					r.mu.Lock()
					defer r.mu.Unlock()
					r.snapshots = append(r.snapshots, s)
				})
			}()
			return r, func() { cancel(); require.NoError(t, <-done) }
		}
		last := func(r *running) types.Snapshot { s := r.published(); return s[len(s)-1] }

		r, stop := start(3)
		after(0)
		require.Equal(t, []string{"2+0"}, r.kinds(), "published while it hangs")
		after(rescan.PollInterval)
		require.Len(t, last(r).Problems, 1)
		require.Contains(t, last(r).Problems[0].Message, "PF ens1f0: its driver has not answered")
		require.Equal(t, "sriov.ifaces[0].vfCount", last(r).Problems[0].Field)
		require.ElementsMatch(t, []string{"ens1f0=3", "ens2f0=3"}, writes)
		stop()

		// Another configuration reaches the rest, and the PF when it answers.
		node.write(filepath.Join(bus, otherAddr, "sriov_numvfs"), "0")
		r, stop = start(5)
		after(rescan.QuietPeriod)
		require.Len(t, last(r).Problems, 1)
		require.ElementsMatch(t, []string{"ens1f0=3", "ens2f0=3", "ens2f0=5"}, writes)
		close(hung)
		after(rescan.PollInterval)
		require.Len(t, last(r).Problems, 1)
		require.Contains(t, last(r).Problems[0].Message, "5 VFs are wanted and it has 3")
		stop()
	})
}

func TestLikelyCause(t *testing.T) {
	for err, want := range map[error]string{
		unix.ENOMEM: "pci=realloc", unix.ENOSPC: "bus numbers", unix.EBUSY: "someone else", unix.EROFS: "writable",
		unix.EACCES: "writable", unix.EOPNOTSUPP: "driver", unix.ENOENT: "driver", unix.ENOSYS: "driver",
	} {
		require.Contains(t, likelyCause(fmt.Errorf("write: %w", err)), want)
	}
	require.Empty(t, likelyCause(unix.EIO))
}

func TestNewWithoutConfig(t *testing.T) {
	m := New(Params{Logger: slog.New(slog.DiscardHandler), SysfsPath: t.TempDir()})
	require.Equal(t, types.DeviceManagerTypeSRIOV, m.Type())
	require.Empty(t, provision(t, m))
}
