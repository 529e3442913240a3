// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/networkdriver/attachments"
	"github.com/cilium/networkdriver/pkg/networkdriver/cdi"
	"github.com/cilium/networkdriver/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/networkdriver/podnet"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/pkg/nic"
)

const (
	testDriver = "networkdriver.cilium.io"
	testNode   = "node-1"
	testBoot   = "boot-1"
)

// host is the state of the machine that the fake devices change.
type host struct {
	mu        sync.Mutex // guards the fields below
	vlans     map[string]int
	calls     []string         // "setup a", "free a", "return a"
	fail      map[string]error // by call
	block     map[string]chan struct{}
	onReturn  func()
	patience  time.Duration // instead of what the room asks for, if set
	sandboxes []attachments.Sandbox
	events    []string
	owed      []Ref
	leftOf    []kubetypes.UID // claims
	held      func(*tables.DRAAllocation) (bool, error)
	cancelled bool // whether a Free saw an ended context
}

func newHost() *host {
	return &host{vlans: map[string]int{}, fail: map[string]error{}, block: map[string]chan struct{}{}}
}

// enter notes the call, waits if it is to wait, and returns the error that it is to fail with.
func (h *host) enter(ctx context.Context, call string) error {
	h.mu.Lock()
	h.calls = append(h.calls, call)
	err, wait := h.fail[call], h.block[call]
	h.mu.Unlock()
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

func (h *host) takeCalls() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	calls := h.calls
	h.calls = nil
	return calls
}

func (h *host) seen(call string) func() bool {
	return func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return slices.Contains(h.calls, call)
	}
}

func (h *host) vlan(device string) (int, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	vlan, set := h.vlans[device]
	return vlan, set
}

// fakeWorld is what the room sees of the host, and the claims' status.
type fakeWorld struct {
	*host
	attachments.StatusWriter
	attachments.Addresses
}

var _ attachments.World = (*fakeWorld)(nil)

func (h *host) Detach(ctx context.Context, _ string, dev types.Device) error {
	if err := h.enter(ctx, "return "+dev.IfName()); err != nil {
		return err
	}
	if h.onReturn != nil {
		h.onReturn()
	}
	return nil
}
func (h *host) HostIndex(context.Context, types.Device) (int, error) { return 1, nil }

func (h *host) Attach(ctx context.Context, netns string, dev types.Device, _ int, config types.DeviceConfig) (*types.Attachment, error) {
	if err := h.enter(ctx, "attach "+dev.IfName()+" "+netns); err != nil {
		return nil, err
	}
	return &types.Attachment{IfName: config.PodIfName}, nil
}
func (h *host) Where(context.Context, string, types.Device) (podnet.Sighting, error) {
	return podnet.Sighting{}, errors.New("not expected")
}
func (h *host) CheckNetNS(netns string) error {
	if netns == "" {
		return errors.New("gone")
	}
	return nil
}
func (h *host) Warn(s attachments.Sandbox, reason, message string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, s.PodName+": "+reason+": "+message)
}

func (h *host) WarnClaim(claim Ref, pod resourceapi.ResourceClaimConsumerReference, reason, message string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, claim.Name+", "+pod.Name+": "+reason+": "+message)
}

// Sandboxes are in the order of the events.
func (h *host) Sandboxes(namespace string) []attachments.Sandbox {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.sandboxes), func(s attachments.Sandbox) bool { return s.PodNamespace != namespace })
}

// run adds a sandbox of the pod.
func (h *host) run(pod, id string) attachments.Sandbox {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := attachments.Sandbox{ID: id, PodUID: kubetypes.UID("uid-" + pod), PodNamespace: "default", PodName: pod, NetNS: "/" + id}
	h.sandboxes = append(h.sandboxes, s)
	return s
}

// stop removes it.
func (h *host) stop(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sandboxes = slices.DeleteFunc(h.sandboxes, func(s attachments.Sandbox) bool { return s.ID == id })
}

func (h *host) takeEvents() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	events := h.events
	h.events = nil
	return events
}
func (h *host) Check(_ context.Context, rows []*tables.DRAAllocation) []error {
	return make([]error, len(rows))
}
func (h *host) Validate(dev types.Device, config types.DeviceConfig) error {
	return dev.Validate(config)
}
func (h *host) Setup(ctx context.Context, dev types.Device, config types.DeviceConfig) (types.Device, error) {
	return dev.Setup(ctx, config)
}
func (h *host) Free(ctx context.Context, dev types.Device, config types.DeviceConfig) error {
	return dev.Free(ctx, config)
}
func (h *host) OpenGate(cdi.Gate) error                { return nil }
func (h *host) CloseGate(kubetypes.UID)                {}
func (h *host) WasOpened(kubetypes.UID, string) bool   { return false }
func (h *host) Describe([]*tables.DRAAllocation) error { return nil }
func (h *host) UndescribeOthers([]tables.ClaimRef)     {}
func (h *host) Undescribe(claim tables.ClaimRef) {
	_ = h.enter(context.Background(), "undescribe "+claim.Name)
}
func (h *host) CloseOtherGates([]kubetypes.UID) {}
func (h *host) ReadMarkers(environment, _ []string) []cdi.Marker {
	return cdi.MarkersIn(environment)
}
func (h *host) Now() time.Time { return time.Now() }
func (h *host) WithTimeout(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if h.patience > 0 {
		limit = h.patience
	}
	return context.WithTimeout(ctx, limit)
}

// fakeDevice is a device of the host. It is prepared if Found is true.
type fakeDevice struct {
	host   *host
	Name   string `json:"name"`
	Kernel string `json:"kernel,omitempty"`
	Found  bool   `json:"found"`
	NoLink bool   `json:"noLink,omitempty"`
	Pad    string `json:"pad,omitempty"`
	// Noted is in the journal and not in records.
	Noted string `json:"-"`
}

var _ types.Noted = (*fakeDevice)(nil)

func (d *fakeDevice) MarshalNote() ([]byte, error) {
	type plain fakeDevice
	return json.Marshal(struct {
		*plain
		Noted string `json:"noted"`
	}{(*plain)(d), d.Noted})
}

func (d *fakeDevice) RestoreNote(data []byte) (types.Device, error) {
	var note struct {
		Noted string `json:"noted"`
	}
	if err := json.Unmarshal(data, &note); err != nil {
		return nil, err
	}
	noted := *d
	noted.Noted = note.Noted
	return &noted, nil
}

var _ types.Device = (*fakeDevice)(nil)

func (d *fakeDevice) MarshalJSON() ([]byte, error) {
	type plain fakeDevice
	return json.Marshal((*plain)(d))
}
func (d *fakeDevice) IfName() string       { return d.Name }
func (d *fakeDevice) KernelIfName() string { return d.Kernel }
func (d *fakeDevice) Attrs() map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	return nil
}
func (d *fakeDevice) Match(*v2alpha1.CiliumNetworkDriverDeviceFilter) bool { return true }
func (d *fakeDevice) Link() nic.Identity {
	if d.NoLink {
		return nic.Identity{}
	}
	return nic.PCI(d.Name)
}
func (d *fakeDevice) HostState() nic.State            { return nic.State{Name: d.Kernel} }
func (d *fakeDevice) Merge(types.Device) types.Device { return d }

// Validate refuses VLANs on devices whose name begins with dummy.
func (d *fakeDevice) Validate(cfg types.DeviceConfig) error {
	if strings.HasPrefix(d.Name, "dummy") && cfg.Vlan != nil {
		return errors.New("vlan: a dummy device has no VLAN filter")
	}
	return nil
}

func (d *fakeDevice) Setup(ctx context.Context, cfg types.DeviceConfig) (types.Device, error) {
	if err := d.host.enter(ctx, "setup "+d.Name); err != nil {
		return nil, err
	}
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	d.host.vlans[d.Name] = cfg.VLAN()
	prepared := *d
	prepared.Found = true
	return &prepared, nil
}

func (d *fakeDevice) Free(ctx context.Context, _ types.DeviceConfig) error {
	if !d.Found {
		return errors.New("freed without having been set up")
	}
	err := d.host.enter(ctx, "free "+d.Name)
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	d.host.cancelled = d.host.cancelled || ctx.Err() != nil
	if err == nil {
		delete(d.host.vlans, d.Name)
	}
	return err
}

// fakeManager restores fake devices.
type fakeManager struct{ host *host }

func (m fakeManager) Type() types.DeviceManagerType { return types.DeviceManagerTypeSRIOV }
func (m fakeManager) Run(ctx context.Context, _ func(types.Snapshot)) error {
	<-ctx.Done()
	return nil
}
func (m fakeManager) RestoreDevice(data []byte) (types.Device, error) {
	type plain fakeDevice
	var d plain
	if err := json.Unmarshal(data, &d); err != nil {
		return nil, fmt.Errorf("decode device: %w", err)
	}
	if d.Name == "" || !d.Found {
		return nil, errors.New("not a prepared device")
	}
	d.host = m.host
	return (*fakeDevice)(&d), nil
}

// fakeStatus is an [attachments.StatusWriter] that keeps what it is told.
type fakeStatus struct {
	mu        sync.Mutex // guards the fields below
	applied   map[kubetypes.UID][]string
	withdrawn []Ref
	fail      error
	during    func()
}

func (s *fakeStatus) Apply(_ context.Context, claim Ref, rows []*tables.DRAAllocation) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.during != nil {
		s.during()
	}
	if s.fail != nil {
		return s.fail
	}
	var names []string
	for _, row := range rows {
		names = append(names, row.DeviceName)
	}
	if s.applied == nil {
		s.applied = map[kubetypes.UID][]string{}
	}
	s.applied[claim.UID] = names
	return nil
}

func (s *fakeStatus) Withdraw(claim Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.withdrawn = append(s.withdrawn, claim)
}

func (s *fakeStatus) takeWithdrawn() []Ref {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.withdrawn
	s.withdrawn = nil
	return w
}

// fixture is a node with its tables.
type fixture struct {
	*Preparer
	t           testing.TB
	db          *statedb.DB
	devices     statedb.RWTable[*tables.DRADevice]
	allocations statedb.RWTable[*tables.DRAAllocation]
	host        *host
	status      *fakeStatus
	world       *fakeWorld
	networks    *fakeNetworks
}

// fakeNetworks are networks that every claim may join, and pools that let claims ask for anything where no rule is set. Devices that
// are in none of pools are in "pool".
type fakeNetworks struct {
	pools    map[string]string
	rules    map[string]string
	networks map[string]*types.Network
	queries  []networks.Query
	left     []string
	// classes are parameters of device classes, as fromClass has them in claims, read counts the reads of them, and away is what the next
	// questions are answered with.
	classes map[string][]string
	// resources are the extended resources of device classes.
	resources map[string]string
	read      int
	away      []error
}

func (n *fakeNetworks) GetClass(_ context.Context, name string) (*resourceapi.DeviceClass, error) {
	n.read++
	if err := n.answer(); err != nil {
		return nil, err
	}
	parameters, ok := n.classes[name]
	if !ok {
		return nil, apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name)
	}
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if resource, ok := n.resources[name]; ok {
		class.Spec.ExtendedResourceName = &resource
	}
	for _, raw := range parameters {
		class.Spec.Config = append(class.Spec.Config, resourceapi.DeviceClassConfiguration{DeviceConfiguration: opaque(testDriver, raw)})
	}
	return class, nil
}

// answer returns the error to answer with, which is then over.
func (n *fakeNetworks) answer() error {
	if len(n.away) == 0 {
		return nil
	}
	err := n.away[0]
	n.away = n.away[1:]
	return err
}

func (n *fakeNetworks) Of(device *tables.DRADevice, rows iter.Seq[*tables.DRAAllocation]) string {
	for row := range rows {
		return row.Pool
	}
	if pool, ok := n.pools[device.Name]; ok {
		return pool
	}
	return "pool"
}

func (n *fakeNetworks) ClaimParameters(pool string) (string, bool) {
	rule, ok := n.rules[pool]
	if !ok {
		rule = v2alpha1.ClaimsAny
	}
	return rule, rule != ""
}

// Holds knows the addresses of rows that say all that is in an address's object.
func (n *fakeNetworks) Holds(_ context.Context, row *tables.DRAAllocation) error {
	for _, said := range []string{row.Config.Network, row.Pool, row.ClaimNamespace, row.ClaimName, string(row.ClaimUID), row.PodName,
		string(row.PodUID), row.Request, row.DeviceName} {
		if said == "" {
			return errors.New("the address is another row's")
		}
	}
	return nil
}

func (n *fakeNetworks) Leave(claim kubetypes.UID, device string) {
	n.left = append(n.left, string(claim)+" "+device)
}

func (n *fakeNetworks) Resolve(_ context.Context, queries []networks.Query) ([]*types.Network, error) {
	n.queries = append(n.queries, queries...)
	if err := n.answer(); err != nil {
		return nil, err
	}
	var found []*types.Network
	for _, q := range queries {
		if n.networks[q.Network] == nil {
			return nil, fmt.Errorf("network %s: there is none", q.Network)
		}
		network := *n.networks[q.Network]
		found = append(found, &network)
	}
	return found, nil
}

// newFixture makes a node whose inventory has the devices of these names.
func newFixture(t testing.TB, names ...string) *fixture {
	t.Helper()
	db := statedb.New()
	devices, err := tables.NewDeviceTable(db)
	require.NoError(t, err)
	allocations, err := tables.NewAllocationTable(db)
	require.NoError(t, err)
	f := &fixture{t: t, db: db, devices: devices, allocations: allocations, host: newHost(), status: &fakeStatus{},
		networks: &fakeNetworks{pools: map[string]string{}, rules: map[string]string{}, networks: map[string]*types.Network{}, classes: map[string][]string{}}}
	log := slog.New(slog.DiscardHandler)
	metrics, err := attachments.NewMetrics(prometheus.NewRegistry())
	require.NoError(t, err)
	f.world = &fakeWorld{f.host, f.status, noAddresses{f.host}}
	f.Preparer = NewPreparer(Params{
		Logger: log, DB: db, Devices: devices, Allocations: allocations,
		Room: attachments.New(log, db, allocations, f.world, metrics), DriverName: testDriver, NodeName: testNode, Metrics: NewMetrics(),
		Sandboxes: f.host, Networks: f.networks, Pools: f.networks, Classes: f.networks, Events: f.host,
	})
	for _, name := range names {
		f.addDevice(&fakeDevice{Name: name})
	}
	return f
}

func (f *fixture) addDevice(d *fakeDevice) {
	f.t.Helper()
	d.host = f.host
	txn := f.db.WriteTxn(f.devices)
	_, _, err := f.devices.Insert(txn, &tables.DRADevice{Name: d.Name, Manager: types.DeviceManagerTypeSRIOV, Dev: d})
	require.NoError(f.t, err)
	txn.Commit()
}

func (f *fixture) rows() []*tables.DRAAllocation {
	return statedb.Collect(f.allocations.All(f.db.ReadTxn()))
}

func (f *fixture) row(device string) *tables.DRAAllocation {
	f.t.Helper()
	row, _, found := f.allocations.Get(f.db.ReadTxn(), tables.AllocationsByDevice(device))
	require.True(f.t, found, "no row for device %s", device)
	return row
}

func (f *fixture) insert(rows ...*tables.DRAAllocation) {
	f.t.Helper()
	txn := f.db.WriteTxn(f.allocations)
	for _, row := range rows {
		_, _, err := f.allocations.Insert(txn, row)
		require.NoError(f.t, err)
	}
	txn.Commit()
}

func (f *fixture) remove(device string) {
	f.t.Helper()
	txn := f.db.WriteTxn(f.allocations)
	_, _, err := f.allocations.Delete(txn, f.row(device))
	require.NoError(f.t, err)
	txn.Commit()
}

func (f *fixture) attach(device string) {
	f.t.Helper()
	f.insert(f.row(device).With(func(r *tables.DRAAllocation) {
		r.Attachment = &types.Attachment{SandboxID: "sandbox", NetNS: "/run/netns/x", IfName: "net1", IfIndex: 7,
			MAC: "02:00:00:00:00:01", IPs: []string{"192.0.2.4/24"}}
	}))
}

// claim builds a claim; each device satisfies the request of the same position.
type claimOption func(*resourceapi.ResourceClaim)

func newClaim(name string, options ...claimOption) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: kubetypes.UID("uid-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	forPod("pod-" + name)(claim)
	for _, o := range options {
		o(claim)
	}
	return claim
}

func forPod(name string) claimOption {
	return func(c *resourceapi.ResourceClaim) {
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
			{Resource: "pods", Name: name, UID: kubetypes.UID("uid-" + name)},
		}
	}
}

func alsoFor(consumer resourceapi.ResourceClaimConsumerReference) claimOption {
	return func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = append(c.Status.ReservedFor, consumer) }
}

// with adds an allocation result, and a request of class "class" if there is none yet of that name.
func with(request, device string) claimOption { return withClass(request, device, "class") }

func withClass(request, device, class string) claimOption {
	return func(c *resourceapi.ResourceClaim) {
		parent, sub, isSub := strings.Cut(request, "/")
		i := slices.IndexFunc(c.Spec.Devices.Requests, func(r resourceapi.DeviceRequest) bool { return r.Name == parent })
		if i < 0 {
			r := resourceapi.DeviceRequest{Name: parent}
			if isSub {
				r.FirstAvailable = []resourceapi.DeviceSubRequest{{Name: sub, DeviceClassName: class}}
			} else {
				r.Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: class}
			}
			c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, r)
		}
		withResult(resourceapi.DeviceRequestAllocationResult{
			Request: request, Driver: testDriver, Pool: testNode + "/pool", Device: device,
		})(c)
	}
}

func withResult(result resourceapi.DeviceRequestAllocationResult) claimOption {
	return func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, result)
	}
}

func fromClass(parameters string, requests ...string) claimOption {
	return config(resourceapi.AllocationConfigSourceClass, testDriver, parameters, requests)
}

func fromClaim(parameters string, requests ...string) claimOption {
	return config(resourceapi.AllocationConfigSourceClaim, testDriver, parameters, requests)
}

func config(source resourceapi.AllocationConfigSource, driver, parameters string, requests []string) claimOption {
	return func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: source, Requests: requests, DeviceConfiguration: opaque(driver, parameters),
		})
	}
}

func opaque(driver, parameters string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)}},
	}
}

func vlan(id int) *int { return &id }

// noAddresses are those of networks that have none.
type noAddresses struct{ of *host }

func (noAddresses) Take(_ context.Context, row *tables.DRAAllocation, _ func(*tables.DRAAllocation) error) (*tables.DRAAllocation, error) {
	return row, nil
}
func (noAddresses) Return(context.Context, *tables.DRAAllocation) {}
func (a noAddresses) ReturnLeft(claim kubetypes.UID) {
	a.of.mu.Lock()
	defer a.of.mu.Unlock()
	a.of.leftOf = append(a.of.leftOf, claim)
}

func (h *host) Tidy(string, types.DeviceConfig) error          { return nil }
func (h *host) Announce(*types.Attachment, types.DeviceConfig) {}
