// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// fakeObserver remembers what it is told.
type fakeObserver map[kubetypes.UID]int

func (o fakeObserver) Observe(claim *resourceapi.ResourceClaim, rows []*tables.DRAAllocation) {
	o[claim.UID] += len(rows)
}

// restored is what came of a restore.
type restored struct {
	*fixture
	log      *testenv.LogBuffer
	observed fakeObserver
	api      *fakeAPI
	restorer *Restorer
}

func newRestored(t testing.TB, api *fakeAPI) *restored {
	return newRestoredWith(t, api, newJournal(t, t.TempDir(), testDriver))
}

func newRestoredWith(t testing.TB, api *fakeAPI, j Journal) *restored {
	r := &restored{fixture: newFixture(t), log: &testenv.LogBuffer{}, observed: fakeObserver{}, api: api}
	r.restorer = NewRestorer(RestorerParams{
		Logger: slog.New(slog.NewTextHandler(r.log, nil)), Room: r.Room, Claims: api,
		Managers: []types.DeviceManager{fakeManager{r.host}}, Observer: r.observed,
		Journal:    j,
		DriverName: testDriver, NodeName: testNode, BootID: testBoot, Networks: r.networks, Addresses: r.networks,
		Pools: r.networks, Classes: r.networks,
	})
	return r
}

func podWith(name string, claims ...string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: kubetypes.UID("uid-" + name)}}
	for _, c := range claims {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "ref-" + c, ResourceClaimName: ptr.To(c)})
	}
	return pod
}

// goodRecord is the record of a device that was prepared for the pod.
func goodRecord(device, pod string) types.Record {
	return types.Record{
		Version: types.RecordVersion, Manager: types.DeviceManagerTypeSRIOV, PodUID: kubetypes.UID("uid-" + pod), BootID: testBoot,
		Config: types.DeviceConfig{PodIfName: "net1", Vlan: vlan(5)}, Device: json.RawMessage(fmt.Sprintf(`{"name":%q,"found":true}`, device)),
	}
}

// recorded adds an entry to the claim's status.
func recorded(device string, record any) claimOption {
	return func(c *resourceapi.ResourceClaim) {
		entry := resourceapi.AllocatedDeviceStatus{Driver: testDriver, Pool: testNode + "/pool", Device: device}
		switch r := record.(type) {
		case nil:
		case string:
			entry.Data = &runtime.RawExtension{Raw: []byte(r)}
		default:
			raw, err := json.Marshal(r)
			if err != nil {
				panic(err)
			}
			entry.Data = &runtime.RawExtension{Raw: raw}
		}
		c.Status.Devices = append(c.Status.Devices, entry)
	}
}

// changed is a good record of device a for pod p with one thing changed.
func changed(change func(*types.Record)) types.Record {
	r := goodRecord("a", "p")
	change(&r)
	return r
}

const parameters = `{"podIfName":"net1","vlan":5}`

func TestRestore(t *testing.T) {
	claim := newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", goodRecord("a", "p")))
	r := newRestored(t, newFakeAPI(claim))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Equal(t, []*tables.DRAAllocation{{
		DeviceName: "a", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &fakeDevice{host: r.host, Name: "a", Found: true},
		Pool: "pool", PodUID: "uid-p", ClaimUID: "uid-c", Config: types.DeviceConfig{PodIfName: "net1", Vlan: vlan(5)},
		ClaimNamespace: "default", ClaimName: "c", PodName: "p", Request: "net", Held: true,
	}}, r.rows())
	require.Equal(t, fakeObserver{"uid-c": 1, "withdrawn uid-c": 1}, r.observed, "a record of a former version is written anew")
	require.Zero(t, r.log.Count("level=WARN"), r.log.String())
	require.Empty(t, r.host.takeCalls(), "a restore touches nothing")
}

// What Prepare writes is what Restore reads, and Prepare and Unprepare work on it.
func TestRestoreWhatPrepareWrote(t *testing.T) {
	claim := newClaim("c", forPod("p"), with("net/s", "a"), with("x", "b"), fromClaim(parameters, "net"))
	f := newWriterFixture(t, newFakeAPI(claim), "a", "b")
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	f.host.takeCalls()

	r := newRestored(t, f.api)
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Len(t, r.rows(), 2)
	for i, row := range r.rows() {
		want := f.rows()[i]
		want.PreparedDevice.(*fakeDevice).host = r.host
		want = want.With(func(r *tables.DRAAllocation) { r.Held = true })
		require.Equal(t, want, row)
	}
	_, err = r.Prepare(t.Context(), claim)
	require.NoError(t, err)
	require.Empty(t, r.host.takeCalls())
	require.NoError(t, r.Unprepare(t.Context(), claim.UID))
	require.Equal(t, []string{"return a", "free a", "return b", "free b"}, r.host.takeCalls())
}

func TestRestoreMatrix(t *testing.T) {
	const doesNotCount = "Record of a device does not count"
	good := goodRecord("a", "p")
	tests := []struct {
		name    string
		options []claimOption
		rows    []string
		logs    []string // each must be there
		quiet   bool     // no warning
	}{
		{name: "another boot", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.BootID = "boot-0" }))},
			logs: []string{"level=INFO", "prepared before the node was booted", "device=a"}, quiet: true},
		{name: "no record", logs: []string{"level=WARN", "no record that it was prepared", "manual cleanup", "device=a", "claim=default/c", "default/p"}},
		{name: "entry without data", options: []claimOption{recorded("a", nil)}, logs: []string{"no record that it was prepared"}},
		{name: "no JSON", options: []claimOption{recorded("a", `{"version":`)}, logs: []string{"level=WARN", doesNotCount, "device=a", "claim=default/c", "decode record"}},
		{name: "no object", options: []claimOption{recorded("a", `"x"`)}, logs: []string{doesNotCount}},
		{name: "unknown version", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.Version = 2 }))}, logs: []string{doesNotCount, "version 2"}},
		{name: "incomplete", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.BootID = "" }))}, logs: []string{doesNotCount, "incomplete"}},
		{name: "bad vlan", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.Config.Vlan = vlan(5000) }))}, logs: []string{doesNotCount, "vlan"}},
		{name: "bad name", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.Config.PodIfName = "../x" }))}, logs: []string{doesNotCount, "podIfName"}},
		{name: "another vlan than the claim's", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.Config.Vlan = vlan(6) }))},
			logs: []string{doesNotCount, "not what the claim asks for"}},
		{name: "not reserved for the pod", options: []claimOption{forPod("q"), recorded("a", good)}, logs: []string{doesNotCount, "not reserved for pod default/p"}},
		{name: "unknown manager", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.Manager = "macvlan" }))}, logs: []string{doesNotCount, "macvlan"}},
		{name: "device that the manager refuses", options: []claimOption{recorded("a", changed(func(r *types.Record) { r.Device = json.RawMessage(`{"name":"a"}`) }))},
			logs: []string{doesNotCount, "not a prepared device"}},
		{name: "another device's identity", options: []claimOption{recorded("a", goodRecord("eth0", "p"))}, logs: []string{doesNotCount, "eth0"}},
		{name: "entry for a device that is not allocated", options: []claimOption{recorded("a", good), recorded("b", goodRecord("b", "p"))},
			rows: []string{"a"}, logs: []string{"level=WARN", "not allocated is ignored", "device=b"}},
		{name: "entry in another pool", options: []claimOption{recorded("a", good), func(c *resourceapi.ResourceClaim) { c.Status.Devices[0].Pool = testNode + "/pool2" }},
			logs: []string{"no record that it was prepared", "not allocated is ignored"}},
		{name: "another driver's entry", options: []claimOption{recorded("a", good), recorded("b", `"x"`), func(c *resourceapi.ResourceClaim) { c.Status.Devices[1].Driver = "gpu.example.com" }},
			rows: []string{"a"}, quiet: true},
		{name: "device on another node", options: []claimOption{recorded("a", good), func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Pool, c.Status.Devices[0].Pool = "node-2/pool", "node-2/pool"
		}}, quiet: true},
		{name: "not allocated any more", options: []claimOption{recorded("a", good), func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil }}, quiet: true},
		{name: "adminAccess", options: []claimOption{recorded("a", good), func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
		}}, quiet: true},
		{name: "one bad, the rest good", options: []claimOption{with("x", "b"), with("y", "d"), recorded("a", `{}`), recorded("b", goodRecord("b", "p")), recorded("d", goodRecord("d", "p"))},
			rows: []string{"b", "d"}, logs: []string{doesNotCount, "device=a"}},
		{name: "parameters that this version does not take", options: []claimOption{recorded("a", good), fromClaim(`{"mtu":9000}`)}, rows: []string{"a"}, quiet: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			claim := newClaim("c", append([]claimOption{forPod("p"), with("net", "a"), fromClaim(parameters)}, tt.options...)...)
			r := newRestored(t, newFakeAPI(claim))
			require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
			var rows []string
			for _, row := range r.rows() {
				rows = append(rows, row.DeviceName)
			}
			require.Equal(t, tt.rows, rows)
			for _, text := range tt.logs {
				require.Contains(t, r.log.String(), text)
			}
			if tt.quiet {
				require.NotContains(t, r.log.String(), "level=WARN")
			}
			require.Empty(t, r.host.takeCalls(), "a restore touches nothing")
			_, writes := r.api.counts()
			require.Zero(t, writes)
		})
	}
}

func TestRestoreFindsClaimsOfPods(t *testing.T) {
	owned := func(pod string) claimOption {
		return func(c *resourceapi.ResourceClaim) {
			c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod, UID: kubetypes.UID("uid-" + pod), Controller: ptr.To(true)}}
		}
	}
	claim := func(name, device string, options ...claimOption) *resourceapi.ResourceClaim {
		return newClaim(name, append([]claimOption{forPod("p"), with("net", device), fromClaim(parameters), recorded(device, goodRecord(device, "p"))}, options...)...)
	}
	pod := podWith("p", "direct", "gone")
	pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims,
		corev1.PodResourceClaim{Name: "tmpl", ResourceClaimTemplateName: ptr.To("t")},
		corev1.PodResourceClaim{Name: "stolen", ResourceClaimTemplateName: ptr.To("t")},
		corev1.PodResourceClaim{Name: "unneeded", ResourceClaimTemplateName: ptr.To("t")},
		corev1.PodResourceClaim{Name: "pending", ResourceClaimTemplateName: ptr.To("t")})
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{
		{Name: "tmpl", ResourceClaimName: ptr.To("p-tmpl-x7")}, {Name: "stolen", ResourceClaimName: ptr.To("stolen")}, {Name: "unneeded"},
	}
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "p-extended-x7"}
	succeeded, failed := podWith("done", "of-done"), podWith("bad", "of-bad")
	succeeded.Status.Phase, failed.Status.Phase = corev1.PodSucceeded, corev1.PodFailed

	r := newRestored(t, newFakeAPI(claim("direct", "a"), claim("p-tmpl-x7", "b", owned("p")), claim("p-extended-x7", "c", owned("p")),
		claim("stolen", "d", owned("q")), claim("of-done", "e", forPod("done")), claim("of-bad", "f", forPod("bad")), claim("unrelated", "g")))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{pod, succeeded, failed, podWith("plain")}))
	var devices []string
	for _, row := range r.rows() {
		devices = append(devices, row.DeviceName)
	}
	require.Equal(t, []string{"a", "b", "c"}, devices)
	require.Contains(t, r.log.String(), "was not created for Pod")
	require.Contains(t, r.log.String(), "Claim of a pod is gone")
	reads, _ := r.api.counts()
	require.Equal(t, 5, reads, "one read for each claim of a pod that has not ended")
}

// A claim that two pods name is read once, and its record says whose device it is.
func TestRestoreClaimOfTwoPods(t *testing.T) {
	claim := newClaim("c", forPod("p"), alsoFor(resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "q", UID: "uid-q"}),
		with("net", "a"), fromClaim(parameters), recorded("a", goodRecord("a", "q")))
	r := newRestored(t, newFakeAPI(claim))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c"), podWith("q", "c")}))
	require.Equal(t, "q", r.row("a").PodName)
	require.Len(t, r.rows(), 1)
	reads, _ := r.api.counts()
	require.Equal(t, 1, reads)
}

// A device of a pod that the claim is no longer reserved for is restored to be passed on, not to be lost, when another
// pod of the node waits for it. It is not attached to the former pod again.
func TestRestoreForTheNextPod(t *testing.T) {
	static := podWith("static")
	static.Annotations = map[string]string{"kubernetes.io/config.hash": "uid-hash"}
	pods := []*corev1.Pod{podWith("first", "c"), podWith("second", "c"), podWith("bystander"), static}
	tests := map[string]struct {
		record  string // the pod's name in it
		pods    []*corev1.Pod
		options []claimOption
		podName string // of the row, if there is one
	}{
		"former pod is ending":                 {record: "first", pods: pods, podName: "first"},
		"former pod is gone":                   {record: "gone", pods: pods, podName: "uid-gone"},
		"nobody waits":                         {record: "first", pods: pods[:1]},
		"nobody here waits":                    {record: "first", pods: pods, options: []claimOption{forPod("elsewhere")}},
		"a pod that does not use the claim":    {record: "bystander", pods: pods},
		"a static pod that does not use it":    {record: "hash", pods: pods},
		"the claim is a template's of another": {record: "gone", pods: []*corev1.Pod{generatedFor("second", "c")}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			claim := newClaim("c", append([]claimOption{forPod("second"), with("net", "a"), fromClaim(parameters), recorded("a", goodRecord("a", tt.record))}, tt.options...)...)
			r := newRestored(t, newFakeAPI(claim))
			require.NoError(t, r.restorer.Restore(t.Context(), tt.pods))
			if tt.podName == "" {
				require.Empty(t, r.rows())
				require.Contains(t, r.log.String(), "does not count")
				return
			}
			require.Equal(t, tt.podName, r.row("a").PodName)
			require.Equal(t, kubetypes.UID("uid-"+tt.record), r.row("a").PodUID)
			require.Equal(t, "Releasing", r.row("a").State())
		})
	}
}

// generatedFor is a pod whose claim was made from a template, and is another pod's by its owner.
func generatedFor(pod, claim string) *corev1.Pod {
	p := podWith(pod)
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "ref", ResourceClaimTemplateName: ptr.To("template")}}
	p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "ref", ResourceClaimName: ptr.To(claim)}}
	return p
}

func TestRestoreOneDeviceTwice(t *testing.T) {
	made := func(name string, at time.Time, options ...claimOption) *resourceapi.ResourceClaim {
		c := newClaim(name, append([]claimOption{forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", goodRecord("a", "p"))}, options...)...)
		c.CreationTimestamp = metav1.NewTime(at)
		return c
	}
	otherPool := func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Results[0].Pool, c.Status.Devices[0].Pool = testNode+"/pool2", testNode+"/pool2"
	}
	old, young := time.Unix(1000, 0), time.Unix(2000, 0)

	r := newRestored(t, newFakeAPI(made("aaa", young), made("zzz", old)))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "aaa", "zzz")}))
	require.Len(t, r.rows(), 1)
	require.Equal(t, "zzz", r.rows()[0].ClaimName, "the older claim has it")
	require.Contains(t, r.log.String(), "recorded for two claims")
	require.Equal(t, fakeObserver{"uid-zzz": 1, "withdrawn uid-zzz": 1}, r.observed)

	r = newRestored(t, newFakeAPI(made("one", old), made("two", young, otherPool)))
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "one", "two")}))
	require.Len(t, r.rows(), 2, "in two pools it is a conflict for the publication to see")
}

func TestRestoreWaitsForTheAPIServer(t *testing.T) {
	claim := newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", goodRecord("a", "p")))
	api := newFakeAPI(claim)
	failures := 2
	api.fail = func(string, string) error {
		if failures--; failures >= 0 {
			return apierrors.NewForbidden(claimsResource, "c", errors.New("not yet"))
		}
		return nil
	}
	r := newRestored(t, api)
	require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c")}))
	require.Len(t, r.rows(), 1)
	require.Equal(t, 2, r.log.Count("cannot be read"))

	api.fail = func(string, string) error { return errors.New("connection refused") }
	r = newRestored(t, api)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.restorer.Restore(ctx, []*corev1.Pod{podWith("p", "c")}) }()
	require.Eventually(t, func() bool { return r.log.Count("connection refused") > 0 }, waitFor, tick)
	cancel()
	err := <-done
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "restore claim default/c")
	require.Empty(t, r.rows())
}

// Whoever may write a claim's status writes what he likes there, and other versions of the agent what they know: of it a row
// comes at most for the device, pod and configuration that the claim is allotted, reserved for and asks for.
func FuzzRestoreRecord(f *testing.F) {
	seed := func(record any) {
		raw, err := json.Marshal(record)
		require.NoError(f, err)
		f.Add(raw)
	}
	seed(goodRecord("a", "p"))
	seed(changed(func(r *types.Record) { r.PodUID = "uid-q" }))
	seed(changed(func(r *types.Record) { r.Version = 2 }))
	seed(changed(func(r *types.Record) { r.BootID = "another" }))
	seed(changed(func(r *types.Record) { r.Journal = "another" }))
	f.Add([]byte(`{"version":1,"manager":"sr-iov","podUID":"uid-p","bootID":"boot-1","config":{"vlan":5,"podIfName":"net1","later":1},"device":{"name":"a","found":true,"settings":{}},"later":[1]}`))
	j := newJournal(f, f.TempDir(), testDriver)
	f.Fuzz(func(t *testing.T, raw []byte) {
		claim := newClaim("c", forPod("p"), with("net", "a"), fromClaim(parameters), recorded("a", string(raw)))
		r := newRestoredWith(t, newFakeAPI(claim), j)
		require.NoError(t, r.restorer.Restore(t.Context(), []*corev1.Pod{podWith("p", "c"), podWith("q", "c")}))
		rows := r.rows()
		require.LessOrEqual(t, len(rows), 1)
		for _, row := range rows {
			require.Equal(t, "a", row.DeviceName)
			require.Equal(t, "a", row.PreparedDevice.IfName())
			require.Equal(t, "pool", row.Pool)
			require.Equal(t, claim.UID, row.ClaimUID)
			require.Equal(t, types.DeviceConfig{PodIfName: "net1", Vlan: vlan(5)}, row.Config)
			require.True(t, row.PodUID == "uid-p" || row.Releasing, "it is for pod %q", row.PodUID)
			require.NoError(t, j.Forget(row))
		}
	})
}

// BenchmarkRestore restores 256 allocations of 128 claims.
func BenchmarkRestore(b *testing.B) {
	var pods []*corev1.Pod
	api := newFakeAPI()
	for i := range 128 {
		name, x, y := fmt.Sprintf("c%d", i), fmt.Sprintf("d%d", 2*i), fmt.Sprintf("d%d", 2*i+1)
		pod := "pod-" + name
		claim := newClaim(name, with("x", x), with("y", y), fromClaim(parameters), recorded(x, goodRecord(x, pod)), recorded(y, goodRecord(y, pod)))
		api.claims["default/"+name] = claim
		pods = append(pods, podWith(pod, name))
	}
	r := newRestored(b, api)
	r.restorer.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	b.ReportAllocs()
	for b.Loop() {
		txn := r.db.WriteTxn(r.allocations)
		require.NoError(b, r.allocations.DeleteAll(txn))
		txn.Commit()
		require.NoError(b, r.restorer.Restore(b.Context(), pods))
	}
	require.Len(b, statedb.Collect(r.allocations.All(r.db.ReadTxn())), 256)
}
