// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package counters

import (
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/netnamespace"
	"github.com/cilium/networkdriver/pkg/networkdriver/sriov"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

type fakeKernel struct {
	mu    sync.Mutex // guards the fields below
	links map[string]rtlink.Counters
	pfs   map[string]map[int]rtlink.Counters
	err   error
	calls []string
	block chan struct{}
}

func (k *fakeKernel) Link(netns string, _ int) (rtlink.Counters, string, bool, error) {
	if k.block != nil {
		<-k.block
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, "link "+netns)
	c, found := k.links[netns]
	return c, "0000:03:00.1", found, k.err
}

func (k *fakeKernel) VFs(pf string) (map[int]rtlink.Counters, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, "pf "+pf)
	return k.pfs[pf], k.err
}

func (k *fakeKernel) Close() {}

type fixture struct {
	*Collector
	*fakeKernel
	registry *prometheus.Registry
	now      time.Time
	silenced [][]string
	log      testenv.LogBuffer
}

func newFixture(t *testing.T, rows ...*tables.DRAAllocation) *fixture {
	db := statedb.New()
	table, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	txn := db.WriteTxn(table)
	for _, row := range rows {
		_, _, err := table.Insert(txn, row)
		require.NoError(t, err)
	}
	txn.Commit()
	f := &fixture{fakeKernel: &fakeKernel{links: map[string]rtlink.Counters{}, pfs: map[string]map[int]rtlink.Counters{}}, now: time.Unix(1, 0)}
	f.Collector = New(Params{
		Logger: slog.New(slog.NewTextHandler(&f.log, nil)), DB: db, Allocations: table, Open: func() (Kernel, error) { return f.fakeKernel, nil },
		Silent: func(pfs []string) { f.silenced = append(f.silenced, pfs) }, Now: func() time.Time { return f.now },
	})
	f.registry = prometheus.NewPedanticRegistry()
	f.registry.MustRegister(f.Collector)
	return f
}

// later makes what was read stale.
func (f *fixture) later() { f.now = f.now.Add(freshness) }

func vf(addr, pf string, id int, change func(*tables.DRAAllocation)) *tables.DRAAllocation {
	row := &tables.DRAAllocation{
		DeviceName: strings.NewReplacer(":", "-", ".", "-").Replace(addr), Pool: "fast", ClaimNamespace: "default", ClaimName: "c", PodName: "p",
		PreparedDevice: &sriov.Device{Addr: addr, PFName: pf, VFID: id, KernelIfaceName: "v"},
	}
	change(row)
	return row
}

func attached(netns string) func(*tables.DRAAllocation) {
	return func(row *tables.DRAAllocation) { row.Attachment = &types.Attachment{NetNS: netns, IfIndex: 7} }
}

func driven(row *tables.DRAAllocation) { row.Config.Driver = types.DriverVFIO }

const bytesReceived = "cilium_networkdriver_device_receive_bytes_total"

func (f *fixture) expect(t *testing.T, series string) {
	t.Helper()
	if series != "" {
		series = "# HELP " + bytesReceived + " Bytes that the pod has received through a device.\n# TYPE " + bytesReceived + " counter\n" + series
	}
	require.NoError(t, testutil.CollectAndCompare(f.Collector, strings.NewReader(series), bytesReceived))
}

func TestCountersOfLinks(t *testing.T) {
	f := newFixture(t, vf("0000:03:00.1", "ens1f0", 0, func(row *tables.DRAAllocation) {
		attached("/run/netns/a")(row)
		row.Config.Network = "storage"
	}), vf("0000:03:00.2", "ens1f0", 1, attached("/run/netns/b")), vf("0000:03:00.3", "ens1f0", 2, func(*tables.DRAAllocation) {}))
	f.links["/run/netns/a"] = rtlink.Counters{RxBytes: 5, RxPackets: 4, RxDropped: 3, TxBytes: 2, TxPackets: 1, TxDropped: 9}
	f.links["/run/netns/b"] = rtlink.Counters{RxBytes: 77} // of 0000:03:00.1 by the kernel's word, so another device's
	series := bytesReceived + `{claim="c",device="0000-03-00-1",namespace="default",network="storage",pf="ens1f0",pod="p",pool="fast"} `
	f.expect(t, series+"5\n")
	require.Equal(t, 6, testutil.CollectAndCount(f.Collector))
	require.Equal(t, []string{"link /run/netns/a", "link /run/netns/b"}, f.calls, "the kernel is asked once")

	f.links["/run/netns/a"] = rtlink.Counters{RxBytes: 6}
	f.expect(t, series+"5\n")
	f.later()
	f.expect(t, series+"6\n")
	require.Empty(t, f.silenced)

	f.err = errors.New("no")
	for range 2 {
		f.later()
		f.expect(t, "")
	}
	require.Equal(t, 1, f.log.Count("counters of device 0000-03-00-1 in pod default/p: no"))
}

// A VF without a link is counted by its PF, in one question for all; one whose PF knows of no traffic has no series instead of zeros.
func TestCountersByPF(t *testing.T) {
	f := newFixture(t, vf("0000:03:00.1", "ens1f0", 0, driven), vf("0000:03:00.2", "ens1f0", 1, driven), vf("0000:04:00.1", "ens2f0", 0, driven))
	f.pfs["ens1f0"] = map[int]rtlink.Counters{0: {RxBytes: 5}, 1: {}}
	f.pfs["ens2f0"] = map[int]rtlink.Counters{0: {}}
	series := func(device, value string) string {
		return bytesReceived + `{claim="c",device="` + device + `",namespace="default",network="",pf="ens1f0",pod="p",pool="fast"} ` + value + "\n"
	}
	f.expect(t, series("0000-03-00-1", "5")+series("0000-03-00-2", "0"))
	require.Equal(t, []string{"pf ens1f0", "pf ens2f0"}, f.calls)
	require.Equal(t, [][]string{{"ens2f0"}}, f.silenced)

	f.later() // the VFs were made anew
	f.pfs["ens1f0"] = map[int]rtlink.Counters{0: {}, 1: {}}
	f.expect(t, series("0000-03-00-1", "0")+series("0000-03-00-2", "0"))
	f.later()
	f.pfs["ens2f0"] = map[int]rtlink.Counters{0: {RxBytes: 1}}
	require.Equal(t, 18, testutil.CollectAndCount(f.Collector))
	require.Equal(t, [][]string{{"ens2f0"}, nil}, f.silenced)
}

// A NIC that does not answer keeps no scrape waiting, and no reading goes on beside another.
func TestHungNIC(t *testing.T) {
	f := newFixture(t, vf("0000:03:00.1", "ens1f0", 0, attached("/a")))
	f.links["/a"] = rtlink.Counters{RxBytes: 5}
	f.block = make(chan struct{})
	require.Zero(t, testutil.CollectAndCount(f.Collector))
	require.Zero(t, testutil.CollectAndCount(f.Collector))
	close(f.block)
	require.Eventually(t, func() bool { return testutil.CollectAndCount(f.Collector) == 6 }, time.Minute, time.Millisecond)
	require.Equal(t, []string{"link /a"}, f.calls)
}

// The real kernel, from one network namespace into another.
func TestHost(t *testing.T) {
	testenv.Privileged(t)
	log := slog.New(slog.DiscardHandler)
	here, there := testenv.NetNS(t), testenv.NetNS(t)
	ns, err := netnamespace.Open(there)
	require.NoError(t, err)
	defer ns.Close()
	conn, err := rtlink.Dial(log, ns)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.Add("veth", "d0", 0))
	made, err := conn.ByName("d0")
	require.NoError(t, err)
	require.NoError(t, conn.Change(made.Attrs().Index, rtlink.Change{Flags: unix.IFF_UP, Mask: unix.IFF_UP}))

	kernel, err := openIn(log, here)
	require.NoError(t, err)
	defer kernel.Close()
	_, parent, found, err := kernel.Link(there, made.Attrs().Index)
	require.NoError(t, err)
	require.True(t, found)
	require.Empty(t, parent)
	_, _, found, err = kernel.Link(there, 4711)
	require.NoError(t, err)
	require.False(t, found)
	_, _, found, err = kernel.Link(there+"-gone", 1)
	require.NoError(t, err)
	require.False(t, found)
	_, err = kernel.VFs("ens1f0")
	require.EqualError(t, err, "there is no interface ens1f0")
	vfs, err := kernel.VFs("lo")
	require.NoError(t, err)
	require.Empty(t, vfs)
}
