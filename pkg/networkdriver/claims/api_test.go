// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"

	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/internal/testenv"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/networkdriver/types"
	"github.com/cilium/networkdriver/test/lab"
)

const otherDriver = "gpu.example.com"

// apiServer is a real API server.
type apiServer struct {
	t      testing.TB
	plane  *lab.ControlPlane
	client *kubernetes.Clientset
}

func startAPIServer(t testing.TB) *apiServer {
	t.Helper()
	bin := testenv.KubeBin(t)
	plane, err := lab.StartControlPlane(t.Context(), lab.ControlPlaneOptions{Dir: t.TempDir(), Bin: []string{bin}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, plane.Stop()) })
	config, err := plane.RESTConfig()
	require.NoError(t, err)
	s := &apiServer{t: t, plane: plane}
	s.client = s.clientFor(config)
	_, err = s.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	require.True(t, err == nil || apierrors.IsAlreadyExists(err), "%v", err)
	return s
}

// TestAPI runs the tests that need a real API server on one of them.
func TestAPI(t *testing.T) {
	s := startAPIServer(t)
	for _, test := range []struct {
		name string
		run  func(*apiServer, *testing.T)
	}{
		{"Owners", (*apiServer).testOwners},
		{"OtherDriversEntries", (*apiServer).testOtherDriversEntries},
		{"RestartWritesNothing", (*apiServer).testRestartWritesNothing},
		{"ParametersAsWritten", (*apiServer).testParametersAsWritten},
		{"Limits", (*apiServer).testLimits},
		{"ClaimMadeAnew", (*apiServer).testClaimMadeAnew},
		{"AllocationEnded", (*apiServer).testAllocationEnded},
		{"Rights", (*apiServer).testRights},
		{"ForgedClass", (*apiServer).testForgedClass},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(&apiServer{t: t, plane: s.plane, client: s.client}, t) })
	}
}

func (s *apiServer) clientFor(config *rest.Config) *kubernetes.Clientset {
	s.t.Helper()
	httpClient, err := rest.HTTPClientFor(config)
	require.NoError(s.t, err)
	s.t.Cleanup(httpClient.CloseIdleConnections)
	client, err := kubernetes.NewForConfigAndClient(config, httpClient)
	require.NoError(s.t, err)
	return client
}

// create creates the claim, with its status.
func (s *apiServer) create(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	s.t.Helper()
	claim.UID = ""
	claims := s.client.ResourceV1().ResourceClaims(claim.Namespace)
	created, err := claims.Create(s.t.Context(), claim, metav1.CreateOptions{})
	require.NoError(s.t, err)
	created.Status = claim.Status
	created, err = claims.UpdateStatus(s.t.Context(), created, metav1.UpdateOptions{})
	require.NoError(s.t, err)
	return created
}

func (s *apiServer) get(name string) *resourceapi.ResourceClaim {
	s.t.Helper()
	claim, err := s.client.ResourceV1().ResourceClaims("default").Get(s.t.Context(), name, metav1.GetOptions{})
	require.NoError(s.t, err)
	return claim
}

// forBoth is a claim with four devices of ours and one of another driver.
func forBoth(name string) *resourceapi.ResourceClaim {
	return newClaim(name, with("n0", "a"), with("n1", "b"), with("n2", "c"), with("n3", "d"), fromClaim(`{"vlan":5}`, "n0"),
		func(c *resourceapi.ResourceClaim) {
			c.Spec.Devices.Requests = append(c.Spec.Devices.Requests,
				resourceapi.DeviceRequest{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu"}})
		},
		withResult(resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: otherDriver, Pool: "gpus", Device: "gpu-0"}))
}

// entriesOf splits the claim's entries by driver.
func entriesOf(claim *resourceapi.ResourceClaim) (ours, others []resourceapi.AllocatedDeviceStatus) {
	for _, entry := range claim.Status.Devices {
		if entry.Driver == testDriver {
			ours = append(ours, entry)
		} else {
			others = append(others, entry)
		}
	}
	return ours, others
}

// Another driver writes its entry at the same time as we write ours, by update and by apply: all are there after each
// round (PREP-15), and ours can be taken away without the other's.
func (s *apiServer) testOtherDriversEntries(t *testing.T) {
	claim := s.create(forBoth("shared"))
	f := newFixture(t, "a", "b", "c", "d")
	f.world.StatusWriter = NewWriter(WriterParams{
		Logger: f.Logger, DB: f.db, Allocations: f.allocations, Client: NewClaimClient(s.client.ResourceV1()),
		DriverName: testDriver, NodeName: testNode, BootID: testBoot,
	})
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	writer := f.world.StatusWriter.(*Writer)

	claims := s.client.ResourceV1().ResourceClaims("default")
	writeOther := func(ctx context.Context, round int) error {
		data := runtime.RawExtension{Raw: fmt.Appendf(nil, `{"round":%d}`, round)}
		if round%2 == 0 {
			_, err := claims.ApplyStatus(ctx, resourceapply.ResourceClaim("shared", "default").WithStatus(resourceapply.ResourceClaimStatus().WithDevices(
				resourceapply.AllocatedDeviceStatus().WithDriver(otherDriver).WithPool("gpus").WithDevice("gpu-0").WithData(data).
					WithConditions(metaapply.Condition().WithType("Ready").WithStatus(metav1.ConditionTrue).WithReason("Yes").WithMessage("").WithLastTransitionTime(metav1.Now())))),
				metav1.ApplyOptions{FieldManager: otherDriver, Force: true})
			return err
		}
		return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			present, err := claims.Get(ctx, "shared", metav1.GetOptions{})
			if err != nil {
				return err
			}
			_, others := entriesOf(present)
			if len(others) != 1 {
				return fmt.Errorf("the other driver has %d entries", len(others))
			}
			for i := range present.Status.Devices {
				if present.Status.Devices[i].Driver == otherDriver {
					present.Status.Devices[i].Data = &data
				}
			}
			_, err = claims.UpdateStatus(ctx, present, metav1.UpdateOptions{FieldManager: otherDriver})
			return err
		})
	}
	for round := range 50 {
		rows := f.rows()
		for i, row := range rows {
			rows[i] = row.With(func(r *tables.DRAAllocation) {
				r.Attachment = &types.Attachment{IfName: fmt.Sprintf("net%d", i), MAC: "02:00:00:00:00:01", IPs: []string{fmt.Sprintf("192.0.2.%d/24", round)}}
			})
		}
		done := make(chan error)
		go func() { done <- writeOther(t.Context(), round) }()
		ours := writer.Apply(t.Context(), RefOf(claim), rows)
		require.NoError(t, errors.Join(ours, <-done), "round %d", round)

		entries, others := entriesOf(s.get("shared"))
		require.Len(t, others, 1, "round %d", round)
		require.JSONEq(t, fmt.Sprintf(`{"round":%d}`, round), string(others[0].Data.Raw))
		require.Len(t, entries, 4, "round %d", round)
		for i, entry := range entries {
			require.Equal(t, fmt.Sprintf("net%d", i), entry.NetworkData.InterfaceName)
			require.Equal(t, []string{fmt.Sprintf("192.0.2.%d/24", round)}, entry.NetworkData.IPs)
			_, err := types.DecodeRecord(entry.Data.Raw)
			require.NoError(t, err)
		}
	}

	_, others := entriesOf(s.get("shared"))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- writer.Run(ctx) }()
	require.NoError(t, f.Unprepare(t.Context(), claim.UID))
	require.Eventually(t, func() bool { return len(s.get("shared").Status.Devices) == 1 }, waitFor, 50*time.Millisecond)
	cancel()
	require.NoError(t, <-done)
	_, left := entriesOf(s.get("shared"))
	require.Equal(t, others, left)
}

// What the server gives back at a restart is what was written: it is restored, and not written again.
func (s *apiServer) testRestartWritesNothing(t *testing.T) {
	claim := s.create(forBoth("restart"))
	params := func(f *fixture) WriterParams {
		return WriterParams{Logger: f.Logger, DB: f.db, Allocations: f.allocations, Client: NewClaimClient(s.client.ResourceV1()),
			DriverName: testDriver, NodeName: testNode, BootID: testBoot}
	}
	f := newFixture(t, "a", "b", "c", "d")
	writer := NewWriter(params(f))
	f.world.StatusWriter = writer
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)
	for _, device := range []string{"a", "b", "c", "d"} {
		f.attach(device)
	}
	require.NoError(t, writer.Apply(t.Context(), RefOf(claim), f.rows()))
	before := s.get("restart")
	require.NoError(t, writer.Apply(t.Context(), RefOf(claim), f.rows()))
	require.Equal(t, before.ResourceVersion, s.get("restart").ResourceVersion, "a repeated write changes nothing")

	pod := podWith("pod-restart", "restart")
	g := newFixture(t)
	again := NewWriter(params(g))
	require.NoError(t, NewRestorer(RestorerParams{
		Logger: g.Logger, Room: g.Room, Claims: NewClaimClient(s.client.ResourceV1()),
		Managers: []types.DeviceManager{fakeManager{g.host}}, Observer: again, DriverName: testDriver, NodeName: testNode, BootID: testBoot,
		Journal: newJournal(t, t.TempDir(), testDriver), Pools: g.networks,
	}).Restore(t.Context(), []*corev1.Pod{pod}))
	require.Len(t, g.rows(), 4)
	for _, device := range []string{"a", "b", "c", "d"} {
		g.attach(device)
	}
	require.True(t, equalStatuses(mustStatuses(t, g.rows()), again.written[claim.UID].server))
	require.NoError(t, again.reconcile(t.Context(), RefOf(claim)))
	require.Equal(t, before.ResourceVersion, s.get("restart").ResourceVersion)
}

// speakProtobuf makes the client one that keeps the bytes of parameters, as the driver's does; JSON loses the blanks.
func (s *apiServer) speakProtobuf() {
	s.t.Helper()
	config, err := s.plane.RESTConfig()
	require.NoError(s.t, err)
	config.ContentType = runtime.ContentTypeProtobuf
	s.client = s.clientFor(config)
}

// Claims that can be applied to, and claims that cannot.
func (s *apiServer) testOwners(t *testing.T) {
	s.speakProtobuf()
	testOwners(t, s.client.ResourceV1(), "applied-", `{"vlan":5}`)
	testOwners(t, s.client.ResourceV1(), "updated-", `{"vlan": 5}`)
}

// Parameters that are not in the form that server-side apply gives them make a claim that cannot be applied to.
func (s *apiServer) testParametersAsWritten(t *testing.T) {
	s.speakProtobuf()
	for i, parameters := range []string{`{"vlan":5}`, `{"vlan": 5}`, `{"vlan":5,"podIfName":"net0"}`, "{\n  \"podIfName\": \"net0\"\n}\n"} {
		name := fmt.Sprintf("written%d", i)
		claim := newClaim(name, with("net", "a"), with("gpu", "g"), fromClaim(parameters, "net"))
		claim.Status.Allocation.Devices.Results[1].Driver = otherDriver
		claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: otherDriver, Pool: claim.Status.Allocation.Devices.Results[1].Pool, Device: "g"}}
		claim = s.create(claim)
		rows := []*tables.DRAAllocation{{DeviceName: "a", Pool: "pool", ClaimNamespace: "default", ClaimName: name, ClaimUID: claim.UID,
			PodUID: "uid", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &fakeDevice{Name: "a"}}}
		writer := NewWriter(WriterParams{Client: NewClaimClient(s.client.ResourceV1()), DriverName: testDriver, NodeName: testNode, BootID: testBoot})
		require.NoError(t, writer.Apply(t.Context(), RefOf(claim), rows), "%s", parameters)
		rows[0] = rows[0].With(func(r *tables.DRAAllocation) { r.Attachment = &types.Attachment{IfName: "net0"} })
		require.NoError(t, writer.Apply(t.Context(), RefOf(claim), rows), "%s", parameters)
		ours, others := entriesOf(s.get(name))
		require.Len(t, ours, 1)
		require.Len(t, others, 1)
		require.Equal(t, "net0", ours[0].NetworkData.InterfaceName)
		require.NoError(t, writer.Apply(t.Context(), RefOf(claim), nil), "%s", parameters)
		ours, others = entriesOf(s.get(name))
		require.Empty(t, ours, "%s", parameters)
		require.Len(t, others, 1)
		require.Equal(t, parameters, string(s.get(name).Status.Allocation.Devices.Config[0].Opaque.Parameters.Raw))
	}
}

func mustStatuses(t *testing.T, rows []*tables.DRAAllocation) []deviceStatus {
	t.Helper()
	statuses, err := statusesOf(rows, testNode, testBoot, "")
	require.NoError(t, err)
	return statuses
}

// The server takes entries at the limits of the API.
func (s *apiServer) testLimits(t *testing.T) {
	claim := s.create(newClaim("limits", with("net", "a")))
	row := &tables.DRAAllocation{DeviceName: "a", Pool: "pool", ClaimNamespace: "default", ClaimName: "limits", ClaimUID: claim.UID,
		PodUID: "uid", Manager: types.DeviceManagerTypeSRIOV, Error: strings.Repeat("ü\x00", 3000),
		Attachment: &types.Attachment{IfName: strings.Repeat("x", 400), MAC: strings.Repeat("0", 400), IPs: []string{"2001:DB8::1/64", "nonsense"}}}
	for i := range 40 {
		row.Attachment.IPs = append(row.Attachment.IPs, fmt.Sprintf("192.0.2.%d/24", i/2))
	}
	row.PreparedDevice = &fakeDevice{Name: "a"}
	s0 := mustStatuses(t, []*tables.DRAAllocation{row})
	row.PreparedDevice = &fakeDevice{Name: "a", Pad: strings.Repeat("x", resourceapi.AllocatedDeviceStatusDataMaxLength-len(s0[0].Data)-len(`,"pad":""`))}
	writer := NewWriter(WriterParams{Client: NewClaimClient(s.client.ResourceV1()), DriverName: testDriver, NodeName: testNode, BootID: testBoot})
	require.NoError(t, writer.Apply(t.Context(), RefOf(claim), []*tables.DRAAllocation{row}))
	entry := s.get("limits").Status.Devices[0]
	require.Len(t, entry.NetworkData.IPs, 16)
	require.Len(t, mustStatuses(t, []*tables.DRAAllocation{row})[0].Data, resourceapi.AllocatedDeviceStatusDataMaxLength)
}

// A claim that was deleted, or made anew under its name, is told from one that cannot be written for now.
func (s *apiServer) testClaimMadeAnew(t *testing.T) {
	claim := s.create(newClaim("anew", with("net", "a")))
	rows := []*tables.DRAAllocation{{DeviceName: "a", Pool: "pool", ClaimNamespace: "default", ClaimName: "anew", ClaimUID: claim.UID,
		PodUID: "uid", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &fakeDevice{Name: "a"}}}
	writer := NewWriter(WriterParams{Client: NewClaimClient(s.client.ResourceV1()), DriverName: testDriver, NodeName: testNode, BootID: testBoot})

	require.NoError(t, s.client.ResourceV1().ResourceClaims("default").Delete(t.Context(), "anew", metav1.DeleteOptions{}))
	err := writer.Apply(t.Context(), RefOf(claim), rows)
	require.Error(t, err)
	require.True(t, writer.isGone(t.Context(), writer.Client, RefOf(claim), err), "%v", err)

	next := s.create(newClaim("anew", with("net", "a")))
	require.NotEqual(t, claim.UID, next.UID)
	err = writer.Apply(t.Context(), RefOf(claim), rows)
	require.Error(t, err)
	require.True(t, writer.isGone(t.Context(), writer.Client, RefOf(claim), err), "%v", err)
	require.Empty(t, s.get("anew").Status.Devices)

	// The present claim, with an entry that the server refuses, is not gone.
	rows[0] = rows[0].With(func(r *tables.DRAAllocation) { r.DeviceName = "not-allocated" })
	err = writer.Apply(t.Context(), RefOf(next), rows)
	require.True(t, isRefused(err), "%v", err)
	require.False(t, writer.isGone(t.Context(), writer.Client, RefOf(next), err))
}

// A device that could not be freed keeps its row. When the claim's allocation has ended, the API server takes no entry
// for it, and that is no error which somebody could mend.
func (s *apiServer) testAllocationEnded(t *testing.T) {
	claim := s.create(newClaim("ended", with("net", "a")))
	f := newFixture(t, "a")
	writer := NewWriter(WriterParams{Logger: f.Logger, DB: f.db, Allocations: f.allocations, Client: NewClaimClient(s.client.ResourceV1()),
		DriverName: testDriver, NodeName: testNode, BootID: testBoot})
	f.world.StatusWriter = writer
	_, err := f.Prepare(t.Context(), claim)
	require.NoError(t, err)

	ended := s.get("ended")
	ended.Status = resourceapi.ResourceClaimStatus{}
	_, err = s.client.ResourceV1().ResourceClaims("default").UpdateStatus(t.Context(), ended, metav1.UpdateOptions{})
	require.NoError(t, err)
	f.insert(f.row("a").With(func(r *tables.DRAAllocation) { r.Error = "free device a: busy" }))
	require.True(t, isRefused(writer.Apply(t.Context(), RefOf(claim), f.rows())), "the server takes no entry")
	require.NoError(t, writer.reconcile(t.Context(), RefOf(claim)))
	require.Empty(t, s.get("ended").Status.Devices)
}

// Parameters in an allocation are compared with those that the server has of the class, however it gives them back.
func (s *apiServer) testForgedClass(t *testing.T) {
	_, err := s.client.ResourceV1().DeviceClasses().Create(t.Context(), &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "class"},
		Spec: resourceapi.DeviceClassSpec{Config: []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: opaque(testDriver, `{ "podIfName":"net1", "vlan": 5 }`)}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	f := newFixture(t, "a", "b")
	f.networks.rules["pool"] = v2alpha1.ClaimsNetworkOnly
	f.Classes = NewClasses(s.client.ResourceV1())
	_, err = f.Prepare(t.Context(), s.create(newClaim("by-class", with("net", "a"), fromClass(`{"vlan":5,"podIfName":"net1"}`))))
	require.NoError(t, err)
	_, err = f.Prepare(t.Context(), s.create(newClaim("forged", with("net", "b"), fromClass(`{"vlan":6,"podIfName":"net1"}`))))
	require.ErrorContains(t, err, "device class class does not have it")
	_, err = f.Prepare(t.Context(), s.create(newClaim("no-class", withClass("net", "b", "none"), fromClass(`{"vlan":5,"podIfName":"net1"}`))))
	require.ErrorContains(t, err, `get device class none: deviceclasses.resource.k8s.io "none" not found`)
}

// What the driver's account needs, and what it is told if that is missing.
func (s *apiServer) testRights(t *testing.T) {
	claim := s.create(newClaim("rights", with("net", "a")))
	rows := []*tables.DRAAllocation{{DeviceName: "a", Pool: "pool", ClaimNamespace: "default", ClaimName: "rights", ClaimUID: claim.UID,
		PodUID: "uid", Manager: types.DeviceManagerTypeSRIOV, PreparedDevice: &fakeDevice{Name: "a"}}}
	config, err := s.plane.UserRESTConfig("driver")
	require.NoError(t, err)
	writer := NewWriter(WriterParams{Client: NewClaimClient(s.clientFor(config).ResourceV1()), DriverName: testDriver, NodeName: testNode, BootID: testBoot})

	err = writer.Apply(t.Context(), RefOf(claim), rows)
	require.True(t, isRefused(err), "%v", err)
	require.ErrorContains(t, err, "needs the verbs patch and update on resourceclaims/status in resource.k8s.io")

	rule := rbacv1.PolicyRule{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims/status"}, Verbs: []string{"patch"}}
	roles := s.client.RbacV1().ClusterRoles()
	role, err := roles.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "driver"}, Rules: []rbacv1.PolicyRule{rule}}, metav1.CreateOptions{})
	require.NoError(t, err)
	_, err = s.client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "driver"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "driver"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "driver"}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		err = writer.Apply(t.Context(), RefOf(claim), rows)
		return err == nil || !apierrors.IsForbidden(err) // the server's own cache has seen the role
	}, waitFor, 50*time.Millisecond)
	if err != nil { // a server that authorizes entries by driver, as Kubernetes does from 1.36 on
		require.True(t, isRefused(err), "%v", err)
		require.ErrorContains(t, err, "resourceclaims/driver")
		role.Rules = append(role.Rules, rbacv1.PolicyRule{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims/driver"},
			Verbs: []string{"arbitrary-node:patch"}, ResourceNames: []string{testDriver}})
		_, err = roles.Update(t.Context(), role, metav1.UpdateOptions{})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return writer.Apply(t.Context(), RefOf(claim), rows) == nil }, waitFor, 50*time.Millisecond)
	}
	require.Len(t, s.get("rights").Status.Devices, 1)
}
